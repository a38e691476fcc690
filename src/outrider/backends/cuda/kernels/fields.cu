// Products with weights of four to six bits on tensor cores: out = x W^T, for x in bfloat16.
//
// A field becomes a bfloat16 by putting its bits into the mantissa of 128: 128 + q is exact, and so is 128 + q - (128 +
// z). Tensor cores sum (q - z) x over the inputs that share a scale; the scale is applied to the sum in float32, and a
// minimum to the sum of the inputs. So the weights are the file's own numbers and are never rounded.
//
// A sum over the inputs is divided by the weight's shape alone: into parts, a part into SLICES, and slice i takes every
// SLICES-th step of 256 inputs. The slices' sums are added in their order. `fields_few` gives every slice to a warp of
// its own, because one row needs many warps to keep the memory busy; in `fields_many` a warp takes all slices, one after
// the other, and the warps of a program share the rows in shared memory. So a row has the same bits alone and among
// many.
//
// Weights come straight into the registers that feed the tensor cores: `fields.py` lays them out so. Of the 16 x 16
// weights of one instruction, lane l holds outputs l / 4 and l / 4 + 8 and four inputs each: 4 (l % 4) + j of a run of 16
// inputs (Q6_K), or 8 (l % 4) + 4 (k % 2) + j of one of 32, so that x is read in pieces of 16 bytes too.
//
// KIND, SCALES (of a step), NT (tiles of eight rows), SLICES, WARPS (of `fields_many`), GATED, GELU, WHOLE (all steps
// have 256 inputs) and BLOCKS (programs on a processor) are given when this is compiled. A warp has two tiles of 16
// outputs: neighbours, or a gate and its partner. Loading the next step's weights before this one's are used was not
// faster, nor was requesting them into the second-level cache: other warps hide the wait.

enum { Q4_0, Q4_1, Q4_K, Q5_K, Q6_K, INT4_HALF, INT4_BFLOAT };

#define EXTRA (KIND == Q6_K ? 2 : KIND == Q5_K ? 1 : 0)
#define LEAST (KIND == Q4_1 || KIND == Q4_K || KIND == Q5_K)  // a minimum beside the scale
#define NESTED (KIND == Q4_K || KIND == Q5_K || KIND == Q6_K)  // scales have a scale
#define ZEROS (KIND == INT4_HALF || KIND == INT4_BFLOAT)  // a zero point beside the scale
#define WORDS (KIND == Q4_0 || NESTED ? 4 : SCALES)  // of scales for each step of an output
#define RUNS (SCALES > 8 ? 16 : 8)  // of inputs that follow each other in a step
#define EACH (16 / SCALES)  // instructions for each scale
#define ROWS (8 * NT)
#define M 2
#define ITEMS ((16 * ROWS + 32 * SLICES - 1) / (32 * SLICES))  // of a tile's results for each thread of `fields_few`
#define PITCH 36  // pieces of 16 bytes between two rows in shared memory: lanes of two rows read different banks

__device__ __forceinline__ float byte_of(u32 word, int i, float less) {  // byte i, without a conversion
  return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7540u | i)) - (8388608.0f + less);
}

struct Scales {  // of a step, for outputs l / 4 and l / 4 + 8 of a tile
  u32 outer[2], inner[2][WORDS];

  __device__ __forceinline__ void load(const u32* scales, const u32* factors, long long place, int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const long long at = place * 16 + lane / 4 + 8 * h;
      if (NESTED) outer[h] = __ldg(factors + at);
      if (WORDS % 4 == 0) {
#pragma unroll
        for (int i = 0; i < WORDS / 4; i++) {
          const uint4 four = __ldg(reinterpret_cast<const uint4*>(scales) + at * (WORDS / 4) + i);
          inner[h][4 * i] = four.x, inner[h][4 * i + 1] = four.y;
          inner[h][4 * i + 2] = four.z, inner[h][4 * i + 3] = four.w;
        }
      } else {
#pragma unroll
        for (int i = 0; i < WORDS; i++) inner[h][i] = __ldg(scales + at * WORDS + i);
      }
    }
  }

  __device__ __forceinline__ float scale(int h, int q) const {
    if (KIND == Q4_0) return half_of(inner[h][q / 2] >> (16 * (q % 2)));
    if (KIND == Q4_K || KIND == Q5_K) return half_of(outer[h]) * byte_of(inner[h][q / 4], q % 4, 0.0f);
    if (KIND == Q6_K) return half_of(outer[h]) * byte_of(inner[h][q / 4], q % 4, 128.0f);
    if (KIND == INT4_BFLOAT) return __uint_as_float(inner[h][q] << 16);
    return half_of(inner[h][q]);
  }

  __device__ __forceinline__ float least(int h, int q) const {
    if (KIND == Q4_1) return half_of(inner[h][q] >> 16);
    return -half_of(outer[h] >> 16) * byte_of(inner[h][2 + q / 4], q % 4, 0.0f);
  }

  __device__ __forceinline__ u32 zero(int h, int q) const {  // -(128 + zero), twice
    if (ZEROS) return (0xC300u + (inner[h][q] >> 16)) * 0x00010001u;
    return (0xC300u + (KIND == Q4_0 ? 8 : KIND == Q6_K ? 32 : 0)) * 0x00010001u;
  }
};

// The weights of instruction k of a block of 64 inputs, from their word and their high bits.
__device__ __forceinline__ void unpack(u32 (&a)[4], u32 word, const u32 (&high)[2], int k, const u32 (&zero)[2]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 field = select(word >> (4 * i), 0x000F000Fu, 0x43004300u);
    if (EXTRA == 2) {
      const int at = 2 * (4 * (k % 2) + i);
      field = select(at >= 4 ? high[k / 2] >> (at - 4) : high[k / 2] << (4 - at), 0x00300030u, field);
    }
    if (EXTRA == 1) {
      const int at = 4 * k + i;
      field = select(at >= 4 ? high[0] >> (at - 4) : high[0] << (4 - at), 0x00100010u, field);
    }
    a[i] = plus(field, zero[i % 2]);
  }
}

struct Step {  // a warp's weights of 256 inputs
  uint4 w[M][4];
  u32 high[M][4][2];
  Scales info[M];

  __device__ __forceinline__ void load(const uint4* words, const u32* highs, const u32* scales, const u32* factors,
                                       const int (&tile)[M], int blocks, int step, int lane) {
    const int steps = (blocks + 3) / 4;
#pragma unroll
    for (int m = 0; m < M; m++) {
      const long long at = (static_cast<long long>(tile[m]) * blocks + step * 4) * 32 + lane;
#pragma unroll
      for (int b = 0; b < 4; b++) {
        const bool inside = WHOLE || step * 4 + b < blocks;
        w[m][b] = inside ? __ldcs(words + at + 32 * b) : make_uint4(0, 0, 0, 0);
        if (EXTRA == 1) high[m][b][0] = inside ? __ldcs(highs + at + 32 * b) : 0;
        if (EXTRA == 2) {
          const uint2 both = inside ? __ldcs(reinterpret_cast<const uint2*>(highs) + at + 32 * b) : make_uint2(0, 0);
          high[m][b][0] = both.x, high[m][b][1] = both.y;
        }
      }
      info[m].load(scales, factors, static_cast<long long>(tile[m]) * steps + step, lane);
    }
  }
};

// 64 inputs of a row for four lanes each: `from` is a row's block, of 8 pieces of 16 bytes.
__device__ __forceinline__ void inputs(uint4 (&in)[2], const uint4* from, bool there, int lane) {
  const uint4 none = make_uint4(0, 0, 0, 0);
  if (RUNS == 8) {
    in[0] = there ? from[lane % 4] : none;
    in[1] = there ? from[4 + lane % 4] : none;
  } else {
    const uint2* runs = reinterpret_cast<const uint2*>(from) + lane % 4;
    const uint2 zero = make_uint2(0, 0);
    const uint2 p = there ? runs[0] : zero, q = there ? runs[4] : zero;
    const uint2 r = there ? runs[8] : zero, s = there ? runs[12] : zero;
    in[0] = make_uint4(p.x, p.y, q.x, q.y), in[1] = make_uint4(r.x, r.y, s.x, s.y);
  }
}

// Adds the products of block b (64 inputs) to `total`; `part` and `plain` are the sums that await their scale.
__device__ __forceinline__ void add_block(float (&total)[M][NT][4], float (&part)[M][NT][4], float (&plain)[NT][4],
                                          const Step& step, const uint4 (&in)[NT][2], int b) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const int at = 4 * b + k, q = at / EACH;
    const bool begins = at % EACH == 0, ends = at % EACH == EACH - 1;
    if (LEAST) {
      const u32 ones[4] = {0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0x3F803F80u};
#pragma unroll
      for (int n = 0; n < NT; n++) {
        if (begins) plain[n][0] = plain[n][1] = plain[n][2] = plain[n][3] = 0.0f;
        const uint4 v = in[n][k / 2];
        mma(plain[n], ones, k % 2 ? v.z : v.x, k % 2 ? v.w : v.y);
      }
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
      const Scales& info = step.info[m];
      const u32 zero[2] = {info.zero(0, q), info.zero(1, q)};
      const uint4 words = step.w[m][b];
      u32 a[4];
      unpack(a, k == 0 ? words.x : k == 1 ? words.y : k == 2 ? words.z : words.w, step.high[m][b], k, zero);
      const float scale[2] = {ends ? info.scale(0, q) : 0.0f, ends ? info.scale(1, q) : 0.0f};
      const float least[2] = {ends && LEAST ? info.least(0, q) : 0.0f, ends && LEAST ? info.least(1, q) : 0.0f};
#pragma unroll
      for (int n = 0; n < NT; n++) {
        if (begins) part[m][n][0] = part[m][n][1] = part[m][n][2] = part[m][n][3] = 0.0f;
        const uint4 v = in[n][k / 2];
        mma(part[m][n], a, k % 2 ? v.z : v.x, k % 2 ? v.w : v.y);
        if (ends) {
#pragma unroll
          for (int i = 0; i < 4; i++) {
            total[m][n][i] = fmaf(scale[i / 2], part[m][n][i], total[m][n][i]);
            if (LEAST) total[m][n][i] = fmaf(least[i / 2], plain[n][i], total[m][n][i]);
          }
        }
      }
    }
  }
}

__device__ __forceinline__ int tile_of(int group, int m, int tiles) {  // beyond the last one: the last one again
  const int pairs = tiles / 2, tile = GATED ? group : group * M + m, last = GATED ? pairs - 1 : tiles - 1;
  return (tile < last ? tile : last) + (GATED && m ? pairs : 0);
}

__device__ __forceinline__ void store_gated(void* out, long long at, float gate, float up) {
  const float steep = GELU ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
  static_cast<u16*>(out)[at] = rounded(gate / (1.0f + __expf(-steep)) * up);
}

// words [tiles, blocks, 32 lanes, 4]; scales [tiles, steps, 16, WORDS]; x [rows, 64 blocks]; out [parts, rows, stride];
// outs: of out, from `column` on; split: steps of a part.
#define ARGUMENTS                                                                                                   \
  const uint4 *__restrict__ words, const u32 *__restrict__ highs, const u32 *__restrict__ scales,                   \
      const u32 *__restrict__ factors, const uint4 *__restrict__ x, void *__restrict__ out, int rows, int outs,     \
      int tiles, int blocks, int split, int stride, int column

#ifdef WARPS

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) fields_many(ARGUMENTS) {
  SHARED_AT_LAUNCH(uint4, shared, 2 * ROWS * PITCH);  // two steps
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = (blocks + 3) / 4;
  const int group = blockIdx.y * WARPS + warp, row = blockIdx.x * ROWS;
  const int tile[M] = {tile_of(group, 0, tiles), tile_of(group, 1, tiles)};
  const int first = blockIdx.z * split, stop = first + split < steps ? first + split : steps;
  float total[M][NT][4] = {};
  auto fetch = [&](int step, int into) {  // the rows' inputs of a step
    for (int i = threadIdx.x; i < ROWS * 32; i += 32 * WARPS) {
      const int r = i / 32, c = i % 32;
      const bool there = row + r < rows && step * 32 + c < blocks * 8;
      const uint4* from = x + (static_cast<long long>(there ? row + r : 0) * blocks * 8 + (there ? step * 32 + c : 0));
      copy_16(shared + (into * ROWS + r) * PITCH + c, from, there);
    }
    end_group();
  };
  auto after = [&](int step) {  // the next step in the order of slices; `stop` at the end
    const int next = step + SLICES, slice = (step - first) % SLICES;
    return next < stop ? next : slice + 1 < SLICES && first + slice + 1 < stop ? first + slice + 1 : stop;
  };
  Step now;
  now.load(words, highs, scales, factors, tile, blocks, first, lane);
  begin();
  int step = first, into = 0;
  fetch(step, into);
  float sum[M][NT][4] = {};
  while (step < stop) {
    const int next = after(step);
    if (step != first) now.load(words, highs, scales, factors, tile, blocks, step, lane);
    if (next < stop) fetch(next, into ^ 1);
    if (next < stop) await_groups<1>();
    else await_groups<0>();
    __syncthreads();
    float part[M][NT][4], plain[NT][4];
#pragma unroll
    for (int b = 0; b < 4; b++) {
      uint4 in[NT][2];
#pragma unroll
      for (int n = 0; n < NT; n++)
        inputs(in[n], shared + (into * ROWS + 8 * n + lane / 4) * PITCH + 8 * b, true, lane);
      add_block(sum, part, plain, now, in, b);
    }
    if (next >= stop || (next - first) % SLICES != (step - first) % SLICES) {  // a slice ends
      const bool initial = (step - first) % SLICES == 0;
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            total[m][n][i] = initial ? sum[m][n][i] : total[m][n][i] + sum[m][n][i];
            sum[m][n][i] = 0.0f;
          }
    }
    __syncthreads();
    step = next, into ^= 1;
  }
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int to = row + 8 * n + lane % 4 * 2 + i % 2, o = lane / 4 + i / 2 * 8;
      if (to >= rows) continue;
      if (GATED) {
        const int output = group * 16 + o;
        const long long at = static_cast<long long>(to) * stride + column + output;
        if (output < outs) store_gated(out, at, total[0][n][i], total[1][n][i]);
      } else {
#pragma unroll
        for (int m = 0; m < M; m++) {
          const int output = (group * M + m) * 16 + o;
          const long long at = (static_cast<long long>(blockIdx.z) * rows + to) * stride + column + output;
          if (output < outs) static_cast<float*>(out)[at] = total[m][n][i];
        }
      }
    }
}

#else

extern "C" __global__ void __launch_bounds__(32 * SLICES, BLOCKS) fields_few(ARGUMENTS) {
  __shared__ float sums[SLICES][16][ROWS + 1];
  const int lane = threadIdx.x % 32, slice = threadIdx.x / 32, steps = (blocks + 3) / 4;
  const int row = blockIdx.x * ROWS + lane / 4, group = blockIdx.y;
  const int tile[M] = {tile_of(group, 0, tiles), tile_of(group, 1, tiles)};
  const int first = blockIdx.z * split, stop = first + split < steps ? first + split : steps;
  float total[M][NT][4] = {};
  Step now;
  if (first + slice < stop) now.load(words, highs, scales, factors, tile, blocks, first + slice, lane);
  begin();
  for (int step = first + slice; step < stop; step += SLICES) {
    if (step != first + slice) now.load(words, highs, scales, factors, tile, blocks, step, lane);
    float part[M][NT][4], plain[NT][4];
#pragma unroll
    for (int b = 0; b < 4; b++) {
      uint4 in[NT][2];
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const bool there = (WHOLE || step * 4 + b < blocks) && row + 8 * n < rows;
        inputs(in[n], x + (static_cast<long long>(row + 8 * n) * blocks + step * 4 + b) * 8, there, lane);
      }
      add_block(total, part, plain, now, in, b);
    }
  }
  float gates[ITEMS];
#pragma unroll
  for (int m = 0; m < M; m++) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[slice][lane / 4 + i / 2 * 8][8 * n + lane % 4 * 2 + i % 2] = total[m][n][i];
    __syncthreads();
#pragma unroll
    for (int j = 0; j < ITEMS; j++) {
      const int item = j * 32 * SLICES + threadIdx.x, o = item % 16, r = item / 16, to = blockIdx.x * ROWS + r;
      if (item >= 16 * ROWS) break;
      float sum = sums[0][o][r];
#pragma unroll
      for (int other = 1; other < SLICES; other++) sum += sums[other][o][r];
      const int output = (GATED ? group : group * M + m) * 16 + o;
      if (GATED && m == 0) gates[j] = sum;
      if (to >= rows || output >= outs) continue;
      const long long at = (static_cast<long long>(blockIdx.z) * rows + to) * stride + column + output;
      if (!GATED) static_cast<float*>(out)[at] = sum;
      else if (m) store_gated(out, at, gates[j], sum);
    }
  }
}

#endif
