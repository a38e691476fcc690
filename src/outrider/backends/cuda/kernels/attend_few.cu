// Attention of a few rows: `attention._attend` for bfloat16, with the same bits and fewer waits.
//
// A program has a block's queries, one key head and SPANS spans of 128 keys at a time, each computed by WARPS warps: a
// warp has the scores of KEYS keys, and then sixteen dimensions of the values. Keys and values go from memory straight
// to the registers that a matrix instruction wants: within sixteen inputs their order changes no bit, so that lane 4g + t
// takes inputs 4t to 4t + 3. All of a program's keys are requested at once, before the kernel waits for the one before
// it; only those that this pass has written come later. Spans are merged from the first to the last, in this program if
// it has all of them, or by the last program that finishes.
//
// DIM, HEADS, KV_HEADS and PACKED (tiles of eight packed rows of the result; 0: rows as they are) are given when this is
// compiled. Sums, products and exponentials are written out one by one: the compiler may not fuse what triton does not.

#define SPAN 128
#define WARPS (DIM / 16)
#define SPANS (16 / WARPS)
#define KEYS (SPAN / WARPS)
#define STEPS (DIM / 16)  // matrix instructions over the dimensions
#define GROUP (HEADS / KV_HEADS)
#define EACH (DIM / 32)  // dimensions of a lane where a warp has one query
#define PITCH 72  // words between two queries' weights: lanes of four queries read different banks
#define WIDTH (DIM + 16)  // floats between two queries' sums, likewise
#define EMPTY (-__int_as_float(0x7F800000))

struct Merged {  // spans of one query, in EACH dimensions
  float high, weight, value[EACH];

  __device__ __forceinline__ void add(float other, float other_weight, const float (&more)[EACH]) {
    const float top = fmaxf(high, other), anchor = top == EMPTY ? 0.0f : top;
    const float old = power_of_two(__fsub_rn(high, anchor)), fresh = power_of_two(__fsub_rn(other, anchor));
    high = top;
    weight = __fmaf_rn(other_weight, fresh, __fmul_rn(weight, old));
#pragma unroll
    for (int i = 0; i < EACH; i++) value[i] = __fmaf_rn(more[i], fresh, __fmul_rn(value[i], old));
  }
};

__device__ __forceinline__ long long packed_index(int row, int k) {  // `fused.packed_index`
  const int lane = row % 8 * 4 + k % 16 / 4;
  return (((static_cast<long long>(k / 32) * PACKED + row / 8) * 32 + lane) * 2 + k % 32 / 16) * 4 + k % 4;
}

// The arguments are those of `_attend`.
extern "C" __global__ void __launch_bounds__(512, 1)
    attend(const u16* q, const u16* k_plane, const u16* v_plane, u16* out, const int* table, const int* info,
           const int* tail, float* sums, float* stats, int* finished, float scale, int length, int depth,
           int max_spans, int scratch_rows, int window, int pending) {
  __shared__ __align__(16) int slots[SPANS * SPAN];
  __shared__ __align__(16) u16 queries[16][DIM + 16];
  __shared__ float highest[SPANS][WARPS][16];
  __shared__ __align__(16) u32 weights[SPANS][16][PITCH];
  __shared__ __align__(16) float totals[SPANS][16][WIDTH];
  __shared__ float2 found[SPANS][16];
  __shared__ int is_last;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  const int span = warp / WARPS, part = warp % WARPS, head = blockIdx.y, split = blockIdx.z;
  const int* about = info + blockIdx.x * 8;
  const int first = __ldcg(about), rows = __ldcg(about + 1), line = __ldcg(about + 2), base = __ldcg(about + 3);
  const int min_keys = __ldcg(about + 4), max_keys = rows > 0 ? min_keys + rows - 1 : 0;  // padding may be anything
  const int earliest = window > 0 && min_keys > window ? (min_keys - window) / SPAN : 0;
  const int end = (max_keys + SPAN - 1) / SPAN, groups = (end - earliest + SPANS - 1) / SPANS;
  const bool alone = gridDim.z == 1 || groups <= 1 || first + rows > scratch_rows;
  const int stride = alone ? 1 : gridDim.z, settled = max_keys - pending;  // later keys may be this pass's

  uint2 k[KEYS / 8][STEPS];
  u32 v[SPAN / 16][4];
  auto find = [&](int group) {  // the slots of a group's keys
    const int p = (earliest + group * SPANS) * SPAN + threadIdx.x;
    if (threadIdx.x >= SPANS * SPAN) return;
    int slot = 0;
    if (p < max_keys) {
      const int* from = p < base ? table + static_cast<long long>(line) * length + p
                                 : tail + static_cast<long long>(blockIdx.x) * depth + p - base;
      slot = __ldcg(from);
    }
    slots[threadIdx.x] = slot;
  };
  auto load = [&](int group, int from, int to) {  // this thread's share of keys `from` to `to`
    const int start = (earliest + group * SPANS + span) * SPAN;
    if (start >= to || start + SPAN <= from) return;
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++) {
      const int i = part * KEYS + 8 * j + g, p = start + i;
      if (p < from || p >= to) continue;
      const u16* row = k_plane + (static_cast<long long>(slots[span * SPAN + i]) * KV_HEADS + head) * DIM + 4 * t;
#pragma unroll
      for (int s = 0; s < STEPS; s++) k[j][s] = __ldcg(reinterpret_cast<const uint2*>(row + 16 * s));
    }
#pragma unroll
    for (int s = 0; s < SPAN / 16; s++) {
      if (start + 16 * s >= to || start + 16 * s + 16 <= from) continue;
      const int4 four = *reinterpret_cast<const int4*>(slots + span * SPAN + 16 * s + 4 * t);
      const int slot[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int p = start + 16 * s + 4 * t + i;
        if (p < from || p >= to) continue;
        const u16* row = v_plane + (static_cast<long long>(slot[i]) * KV_HEADS + head) * DIM + part * 16 + 2 * g;
        v[s][i] = __ldcg(reinterpret_cast<const u32*>(row));
      }
    }
  };
  auto clear = [&]() {  // keys that do not exist
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
      for (int s = 0; s < STEPS; s++) k[j][s] = make_uint2(0, 0);
#pragma unroll
    for (int s = 0; s < SPAN / 16; s++) v[s][0] = v[s][1] = v[s][2] = v[s][3] = 0;
  };

  const int initial = alone ? 0 : split;
  if (rows <= 0 || split >= (alone ? 1 : groups)) {  // nothing to do, but the order of kernels is kept
    begin();
    return;
  }
  find(initial);
  __syncthreads();
  clear();
  load(initial, 0, settled);
  begin();

  int keys[2];  // that rows g and g + 8 of the tile see
#pragma unroll
  for (int h = 0; h < 2; h++) keys[h] = (g + 8 * h) / GROUP < rows ? min_keys + (g + 8 * h) / GROUP : 0;
  for (int i = threadIdx.x; i < 16 * DIM / 8; i += 512) {
    const int m = i / (DIM / 8), d = i % (DIM / 8) * 8;
    const long long index = static_cast<long long>(first + m / GROUP) * HEADS + head * GROUP + m % GROUP;
    const bool there = m / GROUP < rows;
    copy_16(queries[m] + d, there ? q + index * DIM + d : q, there);
  }
  end_group();
  load(initial, settled > 0 ? settled : 0, max_keys);
  await_groups<0>();
  __syncthreads();

  const int own = warp, own_row = first + own / GROUP;  // the query whose spans this warp merges
  const long long own_index = static_cast<long long>(own_row) * HEADS + head * GROUP + own % GROUP;
  const bool owns = own / GROUP < rows;
  Merged merged = {EMPTY, 0.0f, {}};
  for (int group = initial; group < groups; group += stride) {
    if (group != initial) {
      __syncthreads();
      find(group);
      __syncthreads();
      clear();
      load(group, 0, max_keys);
    }
    const int start = (earliest + group * SPANS + span) * SPAN;
    if (start < max_keys) {
      float c[KEYS / 8][4] = {}, high[2] = {EMPTY, EMPTY};
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        const uint2 even = *reinterpret_cast<const uint2*>(queries[g] + 16 * s + 4 * t);
        const uint2 odd = *reinterpret_cast<const uint2*>(queries[g + 8] + 16 * s + 4 * t);
        const u32 all[4] = {even.x, odd.x, even.y, odd.y};
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) mma(c[j], all, k[j][s].x, k[j][s].y);
      }
#pragma unroll
      for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int p = start + part * KEYS + 8 * j + 2 * t + i % 2, h = i / 2;
          if (p >= keys[h] || (window > 0 && p < keys[h] - window)) c[j][i] = EMPTY;
          high[h] = fmaxf(high[h], c[j][i]);
        }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        high[h] = fmaxf(high[h], __shfl_xor_sync(0xFFFFFFFFu, high[h], 1));
        high[h] = fmaxf(high[h], __shfl_xor_sync(0xFFFFFFFFu, high[h], 2));
        if (t == 0) highest[span][part][g + 8 * h] = high[h];
      }
      meet(span + 1, 32 * WARPS);
      float less[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int other = 0; other < WARPS; other++) high[h] = fmaxf(high[h], highest[span][other][g + 8 * h]);
        high[h] = __fmul_rn(high[h], scale);
        less[h] = high[h] == EMPTY ? 0.0f : -high[h];
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++)
          weights[span][g + 8 * h][(part * KEYS + 8 * j) / 2 + t] =
              both_rounded(power_of_two(__fmaf_rn(c[j][2 * h], scale, less[h])),
                           power_of_two(__fmaf_rn(c[j][2 * h + 1], scale, less[h])));
      }
      meet(span + 1, 32 * WARPS);
      float total[2][4] = {}, weight[4] = {};
#pragma unroll
      for (int s = 0; s < SPAN / 16; s++) {
        const uint2 even = *reinterpret_cast<const uint2*>(&weights[span][g][8 * s + 2 * t]);
        const uint2 odd = *reinterpret_cast<const uint2*>(&weights[span][g + 8][8 * s + 2 * t]);
        const u32 all[4] = {even.x, odd.x, even.y, odd.y};
        mma(weight, all, 0x3F803F80u, 0x3F803F80u);
        mma(total[0], all, __byte_perm(v[s][0], v[s][1], 0x5410), __byte_perm(v[s][2], v[s][3], 0x5410));
        mma(total[1], all, __byte_perm(v[s][0], v[s][1], 0x7632), __byte_perm(v[s][2], v[s][3], 0x7632));
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        *reinterpret_cast<float4*>(&totals[span][g + 8 * h][16 * part + 4 * t]) =
            make_float4(total[0][2 * h], total[1][2 * h], total[0][2 * h + 1], total[1][2 * h + 1]);
        if (part == 0 && t == 0) found[span][g + 8 * h] = make_float2(high[h], weight[2 * h]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int other = 0; other < SPANS; other++) {
      const int at = earliest + group * SPANS + other;
      if (at >= end || !owns) continue;
      float more[EACH];
#pragma unroll
      for (int i = 0; i < EACH; i++) more[i] = totals[other][own][EACH * lane + i];
      const float2 both = found[other][own];
      if (alone) {
        merged.add(both.x, both.y, more);
      } else {
        const long long place = own_index * max_spans + at;
#pragma unroll
        for (int i = 0; i < EACH; i++) __stcg(sums + place * DIM + EACH * lane + i, more[i]);
        if (lane == 0) __stcg(stats + 2 * place, both.x), __stcg(stats + 2 * place + 1, both.y);
      }
    }
  }
  if (!alone) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      const int programs = groups < static_cast<int>(gridDim.z) ? groups : gridDim.z;
      is_last = atomicAdd(finished + first * KV_HEADS + head, 1) + 1 == programs;
      if (is_last) finished[first * KV_HEADS + head] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int some = earliest; owns && some < end; some += 8) {
      float more[8][EACH], highs[8], many[8];
#pragma unroll
      for (int j = 0; j < 8; j++) {  // their loads wait together; beyond the end spans are empty
        const long long place = own_index * max_spans + some + j;
        const bool here = some + j < end;
        highs[j] = here ? __ldcg(stats + 2 * place) : EMPTY;
        many[j] = here ? __ldcg(stats + 2 * place + 1) : 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) more[j][i] = here ? __ldcg(sums + place * DIM + EACH * lane + i) : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < 8; j++) merged.add(highs[j], many[j], more[j]);
    }
  }
  if (!owns) return;
  const int column = (head * GROUP + own % GROUP) * DIM + EACH * lane;
  u16* to = out + (PACKED ? packed_index(own_row, column) : static_cast<long long>(own_row) * HEADS * DIM + column);
#pragma unroll
  for (int i = 0; i < EACH; i += 2)
    *reinterpret_cast<u32*>(to + i) =
        both_rounded(ratio(merged.value[i], merged.weight), ratio(merged.value[i + 1], merged.weight));
}
