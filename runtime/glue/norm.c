/* The elementwise parts of RMSNorm, forward and backward, one pass over memory each (rmsnorm.py has the rest).
 *
 * Each step rounds where torch's own operators round: to bfloat16 wherever those write a bfloat16 tensor, to float32
 * elsewhere. Compiled without contraction or reassociation, so that bits are those of the operators one by one.
 */
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define STEP (2 * LANES)
#define FEW 32768 /* elements below which threads cost more than they save */
#define UPPER 0xffff0000u
#define AT(type, pointer) (*(type *)(pointer))

typedef uint16_t bf16;
typedef float f32;
typedef float floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(64), aligned(4), may_alias));

/* STEP elements as floats: of bfloat16 those at even and those at odd places, which saves widening and narrowing
 * (a word's lower half is the earlier one); of float32 the first and the second LANES. */
typedef struct { floats half[2]; } Many;

/* normops.py's _Rows has the same fields. Rows in up to three dimensions, each operand with strides (in elements) of
 * its own; a row's elements lie side by side. */
typedef struct {
    int64_t sizes[3], width, threads;
    int64_t grad[3], x[3], inverse[3], of_square[3], out[3];
} Rows;

typedef struct { int64_t at[3]; } Row;

INLINE Row row_of(const Rows *f, int64_t number) {
    int64_t others = number / f->sizes[2];
    return (Row){{others / f->sizes[1], others % f->sizes[1], number % f->sizes[2]}};
}

INLINE int64_t place(Row row, const int64_t strides[3]) {
    return row.at[0] * strides[0] + row.at[1] * strides[1] + row.at[2] * strides[2];
}

INLINE int64_t rows_in(const Rows *f) { return f->sizes[0] * f->sizes[1] * f->sizes[2]; }

/* Statements for every STEP of a row: n elements from i on. */
#define EACH(width, ...) do { \
    int64_t i = 0; \
    for (; i + STEP <= (width); i += STEP) { const int64_t n = STEP; __VA_ARGS__; } \
    if (i < (width)) { const int64_t n = (width) - i; __VA_ARGS__; } \
} while (0)

INLINE Many load_f32(const f32 *p, int64_t n) {
    if (n == STEP) return (Many){{AT(const floats, p), AT(const floats, p + LANES)}};
    Many v = {0};
    memcpy(&v, p, (size_t)n * sizeof(f32));
    return v;
}

INLINE void store_f32(f32 *p, Many v, int64_t n) {
    if (n == STEP) AT(floats, p) = v.half[0], AT(floats, p + LANES) = v.half[1];
    else memcpy(p, &v, (size_t)n * sizeof(f32));
}

INLINE floats round_f32(floats v) { return v; }
INLINE Many in_order_f32(Many v) { return v; }

INLINE Many load_bf16(const bf16 *p, int64_t n) {
    words pairs = {0};
    memcpy(&pairs, p, (size_t)n * sizeof(bf16));
    return (Many){{(floats)(pairs << 16), (floats)(pairs & UPPER)}};
}

/* The nearest bfloat16, ties to even, in the upper halves; the lower ones are not cleared. A NaN stays one: here it comes
 * from a bfloat16 or from the processor, so that its lower half is zero and carries nothing over. */
INLINE words rounded(floats v) {
    words bits = (words)v;
    return bits + (bits >> 16 & 1u) + 0x7fffu;
}

INLINE floats round_bf16(floats v) { return (floats)(rounded(v) & UPPER); }

INLINE void store_bf16(bf16 *p, Many v, int64_t n) {
    words pairs = rounded(v.half[0]) >> 16 | (rounded(v.half[1]) & UPPER);
    memcpy(p, &pairs, (size_t)n * sizeof(bf16));
}

INLINE Many in_order_bf16(Many v) {
    floats a = v.half[0], b = v.half[1];
    return (Many){{__builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
                   __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)}};
}

#define FOR_ROWS(f) \
    int64_t rows = rows_in(f), width = f->width; \
    int threads = (int)f->threads; \
    _Pragma("omp parallel for num_threads(threads) if (threads > 1 && rows * width >= FEW)") \
    for (int64_t number = 0; number < rows; number++)

#define KERNELS(T) \
void rms_square_##T(const Rows *f, const T *x, f32 *out) { \
    FOR_ROWS(f) { \
        Row row = row_of(f, number); \
        const T *a = x + place(row, f->x); \
        f32 *y = out + place(row, f->out); \
        EACH(width, \
            Many h = in_order_##T(load_##T(a + i, n)); \
            for (int j = 0; j < 2; j++) h.half[j] *= h.half[j]; \
            store_f32(y + i, h, n)); \
    } \
} \
void rms_scale_##T(const Rows *f, const T *x, const f32 *inverse, const T *weight, T *out) { \
    FOR_ROWS(f) { \
        Row row = row_of(f, number); \
        const T *a = x + place(row, f->x); \
        T *y = out + place(row, f->out); \
        f32 factor = inverse[place(row, f->inverse)]; \
        EACH(width, \
            Many h = load_##T(a + i, n), w = load_##T(weight + i, n); \
            for (int j = 0; j < 2; j++) h.half[j] = w.half[j] * round_##T(h.half[j] * factor); \
            store_##T(y + i, h, n)); \
    } \
} \
void rms_product_##T(const Rows *f, const T *grad, const T *x, const T *weight, f32 *out) { \
    FOR_ROWS(f) { \
        Row row = row_of(f, number); \
        const T *g = grad + place(row, f->grad), *a = x + place(row, f->x); \
        f32 *y = out + place(row, f->out); \
        EACH(width, \
            Many h = load_##T(a + i, n), w = load_##T(weight + i, n), v = load_##T(g + i, n); \
            for (int j = 0; j < 2; j++) h.half[j] *= round_##T(v.half[j] * w.half[j]); \
            store_f32(y + i, in_order_##T(h), n)); \
    } \
} \
void rms_gradient_##T(const Rows *f, const T *grad, const T *x, const T *weight, const f32 *inverse, const f32 *of_square, \
                      T *out) { \
    FOR_ROWS(f) { \
        Row row = row_of(f, number); \
        const T *g = grad + place(row, f->grad), *a = x + place(row, f->x); \
        T *y = out + place(row, f->out); \
        f32 factor = inverse[place(row, f->inverse)], through = of_square[place(row, f->of_square)]; \
        EACH(width, \
            Many h = load_##T(a + i, n), w = load_##T(weight + i, n), v = load_##T(g + i, n); \
            for (int j = 0; j < 2; j++) \
                v.half[j] = round_##T(v.half[j] * w.half[j]) * factor + through * (h.half[j] * 2.0f); \
            store_##T(y + i, v, n)); \
    } \
}
KERNELS(bf16)
KERNELS(f32)
