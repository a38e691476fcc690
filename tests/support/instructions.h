// Words of CUDA C++ and the functions of `kernels/instructions.cu` on a CPU: every thread of a program is a thread here,
// and a barrier is one. Sums of a matrix instruction are rounded once. Programs run one after the other.

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;

struct Index { int x, y, z; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define SHARED_AT_LAUNCH(type, name, count) static type name[count]

static thread_local Index threadIdx, blockIdx;
static Index gridDim;

typedef std::unique_ptr<std::barrier<>> Barrier;
static Barrier program, warps[32], barriers[16];  // barriers are of `meet`
static u32 given[32][32][6];  // by the lanes of each warp

static void __syncthreads() { program->arrive_and_wait(); }
static void warp_meets() { warps[threadIdx.x / 32]->arrive_and_wait(); }
static void meet(int barrier, int) { barriers[barrier]->arrive_and_wait(); }
static void begin() {}
static void __threadfence() {}
static int atomicAdd(int* to, int value) { return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST); }

template <class T, class F> static T as(F from) { T to; static_assert(sizeof to == sizeof from); std::memcpy(&to, &from, sizeof to); return to; }
static float __uint_as_float(u32 bits) { return as<float>(bits); }
static float __int_as_float(int bits) { return as<float>(bits); }
static float low_half(u32 word) { return as<float>(word << 16); }
static u16 rounded(float value) {
  const u32 bits = as<u32>(value);
  return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static u32 both_rounded(float low, float high) { return rounded(low) | static_cast<u32>(rounded(high)) << 16; }
static u32 select(u32 word, u32 mask, u32 bits) { return (word & mask) | bits; }
static u32 plus(u32 a, u32 b) { return both_rounded(low_half(a) + low_half(b), low_half(a >> 16) + low_half(b >> 16)); }
static float half_of(u32 word) { return as<_Float16>(static_cast<u16>(word)); }
static float power_of_two(float x) { return std::exp2(x); }
static float ratio(float a, float b) { return a / b; }
#define __expf std::exp

static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
using std::fmaf;

static u32 __byte_perm(u32 a, u32 b, u32 places) {
  const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
  u32 out = 0;
  for (int i = 0; i < 4; i++) out |= static_cast<u32>(both >> 8 * (places >> 4 * i & 7) & 255) << 8 * i;
  return out;
}

template <class T> static T __ldg(const T* from) { return *from; }
template <class T> static T __ldcg(const T* from) { return *from; }
template <class T> static T __ldcs(const T* from) { return *from; }
template <class T> static void __stcg(T* to, T value) { *to = value; }
static void to_cache(const void* line) { volatile char read = *static_cast<const char*>(line); (void)read; }
static void copy_16(void* shared, const void* from, bool there = true) {
  if (there) std::memcpy(shared, from, 16);
  else std::memset(shared, 0, 16);
}
static void end_group() {}
template <int LEFT> static void await_groups() {}

static float __shfl_xor_sync(u32, float value, int other) {
  auto& all = given[threadIdx.x / 32];
  all[threadIdx.x % 32][0] = as<u32>(value);
  warp_meets();
  const float found = as<float>(all[threadIdx.x % 32 ^ other][0]);
  warp_meets();
  return found;
}

static void mma(float (&c)[4], const u32 (&w)[4], u32 low, u32 high) {
  auto& all = given[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  const u32 own[6] = {w[0], w[1], w[2], w[3], low, high};
  std::memcpy(all[lane], own, sizeof own);
  warp_meets();
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4, column = lane % 4 * 2 + i % 2;
    double sum = c[i];
    for (int k = 0; k < 16; k++) {
      const u32 left = all[4 * row + k % 8 / 2][i / 2 + k / 8 * 2], right = all[4 * column + k % 8 / 2][4 + k / 8];
      sum += static_cast<double>(low_half(left >> 16 * (k % 2))) * low_half(right >> 16 * (k % 2));
    }
    c[i] = static_cast<float>(sum);
  }
  warp_meets();
}

template <class... A, std::size_t... I>
static void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<A*>(arguments[I])...);
}

// The kernel in every program of the grid; `group` threads share each of `meet`'s barriers.
template <class... A>
static void run_grid(void (*kernel)(A...), Index grid, int threads, int group, void** arguments) {
  gridDim = grid;
  for (int n = 0; n < grid.x * grid.y * grid.z; n++) {
    program = std::make_unique<std::barrier<>>(threads);
    for (int i = 0; i < threads / 32; i++) warps[i] = std::make_unique<std::barrier<>>(32);
    for (auto& each : barriers) each = std::make_unique<std::barrier<>>(group);
    std::vector<std::thread> all;
    for (int i = 0; i < threads; i++)
      all.emplace_back([=] {
        threadIdx = {i, 0, 0}, blockIdx = {n % grid.x, n / grid.x % grid.y, n / grid.x / grid.y};
        call(kernel, arguments, std::index_sequence_for<A...>());
      });
    for (auto& each : all) each.join();
  }
}
