/* One product of the kernels as a program, so that every instruction set can be compared, emulated ones too.
 *
 * stdin: int64 bits (-1: int8), inputs, outputs, rows, outliers; then the weights and the rows as below.
 * stdout: [rows, outputs] floats. The first line of stderr is the instruction set.
 */
#include "blocks.h"

#include <stdio.h>

static void take(void *into, size_t bytes) {
    if (fread(into, 1, bytes, stdin) != bytes) exit(2);
}

static void *room(size_t bytes) { return aligned_alloc(64, (bytes + 4095) / 64 * 64); }

static void *taken(size_t bytes) {
    void *memory = room(bytes);
    take(memory, bytes);
    return memory;
}

int main(void) {
    int64_t head[5];
    take(head, sizeof head);
    const int64_t bits = head[0], inputs = head[1], outputs = head[2], rows = head[3], outliers = head[4];
    const int64_t blocks = (outputs + OUTPUTS - 1) / OUTPUTS, pieces = (outputs + LANES - 1) / LANES;
    const int64_t units = inputs / (bits >= Q4_K ? SPAN : 32);
    Linear linear = {.outputs = outputs, .inputs = inputs, .outlier_count = outliers};
    struct Piece *table = room((size_t)pieces * sizeof *table);
    if (bits >= 0) {
        const int64_t unit = unit_bytes(bits), piece = units * unit;
        const uint8_t *data = taken((size_t)(pieces * piece));
        for (int64_t i = 0; i < pieces; i++) /* units of two pieces alternate; an odd one is alone */
            table[i] = i / 2 * 2 + 1 < pieces ? (struct Piece){data + i / 2 * 2 * piece + i % 2 * unit, bits, 2 * unit}
                                              : (struct Piece){data + i * piece, bits, unit};
        linear.pieces = table;
    } else {
        linear.weight = taken((size_t)(blocks * steps_of(&linear) * STEP));
        linear.high = taken((size_t)(blocks * outliers / 4 * STEP));
        linear.scale = taken((size_t)(blocks * OUTPUTS) * sizeof(float));
        linear.outliers = taken((size_t)outliers * sizeof(int64_t));
    }
    Packed packed = {.stride = inputs * 3 / 2 + 256, .rows = rows};
    packed.inputs = room((size_t)(rows * packed.stride) * sizeof(Input));
    packed.scale = room((size_t)rows * sizeof(float));
    packed.offset = room((size_t)rows * sizeof(int32_t));
    float *x = room((size_t)(inputs + W) * sizeof *x), *out = room((size_t)(rows * outputs) * sizeof *out);
    for (int64_t t = 0; t < rows; t++) {
        take(x, (size_t)inputs * sizeof *x);
        if (bits >= 0) quantise_units(&linear, x, (char *)(packed.inputs + t * packed.stride));
        else quantise(&linear, x, &packed, t);
    }
    const Product product = {&linear, packed, out, outputs, STORE};
    for (int64_t block = 0; block < blocks; block++) (bits >= 0 ? multiply_pieces : multiply_block)(&product, block);
    fwrite(out, sizeof *out, (size_t)(rows * outputs), stdout);
    fprintf(stderr, "%s\n", DOT_ISA);
    return 0;
}
