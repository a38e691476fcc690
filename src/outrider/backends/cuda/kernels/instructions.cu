// What the other CUDA sources here need and C++ has no word for. It is compiled in front of each of them; tests put
// functions that run on a CPU in its place.

typedef unsigned int u32;
typedef unsigned short u16;

#define SHARED_AT_LAUNCH(type, name, count) extern __shared__ type name[]  // as many as the launch says

// c += w xᵀ: of lane 4 g + t, `w` has rows g, g + 8, g, g + 8 and `low`, `high` are of column g; c: as PTX has it.
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&w)[4], u32 low, u32 high) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(low), "r"(high));
}

__device__ __forceinline__ u32 select(u32 word, u32 mask, u32 bits) {  // (word & mask) | bits
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(out) : "r"(word), "r"(mask), "r"(bits));
  return out;
}

__device__ __forceinline__ u32 plus(u32 a, u32 b) {  // two bfloat16 each
  u32 out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(0x3F803F80u), "r"(b));
  return out;
}

__device__ __forceinline__ float half_of(u32 word) {  // the low half
  float out;
  asm("{.reg .f16 h; .reg .b16 l, u; mov.b32 {l, u}, %1; mov.b16 h, l; cvt.f32.f16 %0, h;}" : "=f"(out) : "r"(word));
  return out;
}

__device__ __forceinline__ u16 rounded(float value) {  // to bfloat16
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ u32 both_rounded(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// As triton has them: their bits are those of its kernels.
__device__ __forceinline__ float power_of_two(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

__device__ __forceinline__ float ratio(float a, float b) {
  float out;
  asm("div.full.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

__device__ __forceinline__ void to_cache(const void* line) {  // to the second level
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// 16 bytes to shared memory, or zeros, without waiting. Copies are awaited in groups.
__device__ __forceinline__ void copy_16(void* shared, const void* from, bool there = true) {
  const u32 to = static_cast<u32>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void await_groups() {  // all but the last ones
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A kernel may start before the one before it has ended (`launching.py` has the rule): until here it reads weights alone,
// and what describes its rows.
__device__ __forceinline__ void begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
