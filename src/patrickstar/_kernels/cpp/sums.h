// Sums of squares in fixed order: see [Note: sums in fixed order] in `_kernels/grad_norm.py`. Included by `loops.cpp`,
// which is compiled once per instruction set.
#pragma once

#include "formats.h"

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace patrickstar {
namespace {

// The sums of LANES are held in PARTS registers of WIDTH doubles each.
#if defined(__AVX512F__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int PARTS = LANES / WIDTH;
typedef double Doubles __attribute__((vector_size(WIDTH * sizeof(double))));
typedef float Floats __attribute__((vector_size(WIDTH * sizeof(float))));
typedef uint32_t Words __attribute__((vector_size(WIDTH * sizeof(uint32_t))));

// Adds the squares. The square of a float is exact in double, so fusing it with the addition changes no bit.
inline void add_squares(Doubles& sums, const Floats& values) {
#if defined(__AVX512F__)
    const __m512d wide = _mm512_cvtps_pd((__m256)values);
    sums = (Doubles)_mm512_fmadd_pd(wide, wide, (__m512d)sums);
#else
    const Doubles wide = __builtin_convertvector(values, Doubles);
    sums += wide * wide;
#endif
}

// Parts of a row in order or, if `by_parity`, the even elements of each two parts followed by the odd ones.
struct Lanes {
    Doubles parts[PARTS] = {};
    bool by_parity;

    // Returns the sum of all lanes by halving (16 to 16, 8 to 8, and so on), in the same order for both arrangements.
    double halve() const {
        Doubles sums[PARTS];
        std::memcpy(sums, parts, sizeof sums);
        const int last = by_parity ? 2 : 1;
        for (int width = PARTS / 2; width >= last; width /= 2)
            for (int part = 0; part < width; part++) sums[part] += sums[part + width];
        return by_parity ? halved(sums[0]) + halved(sums[1]) : halved(sums[0]);
    }

    static double halved(const Doubles& values) {
        double lanes[WIDTH];
        std::memcpy(lanes, &values, sizeof lanes);
        for (int width = WIDTH / 2; width > 0; width /= 2)
            for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
        return lanes[0];
    }
};

// Distance between the current row and the memory being prefetched. The hardware prefetcher does not look far enough
// ahead for one core to use the full memory bandwidth.
constexpr int64_t ROW_PREFETCH_BYTES = 16384;

template <int32_t dtype>
inline void load_row(const void* grads, int64_t first, Floats (&row)[PARTS]) {
    const char* bytes = static_cast<const char*>(grads) + first * (dtype == FLOAT32 ? 4 : 2);
    __builtin_prefetch(bytes + ROW_PREFETCH_BYTES);
    if constexpr (dtype == FLOAT32) {
        __builtin_prefetch(bytes + ROW_PREFETCH_BYTES + CACHE_LINE_BYTES);
        std::memcpy(row, bytes, sizeof row);
    } else if constexpr (dtype == BFLOAT16) {
        for (int part = 0; part < PARTS; part += 2) {  // two elements per word: the even ones are the low halves
            Words words;
            std::memcpy(&words, bytes + part * sizeof words / 2, sizeof words);
            row[part] = (Floats)(words << 16);
            row[part + 1] = (Floats)(words & 0xffff0000u);
        }
    } else {
#if defined(__AVX512F__)
        for (int part = 0; part < PARTS; part++)
            row[part] = (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(bytes + part * 2 * WIDTH)));
#elif defined(__F16C__)
        for (int part = 0; part < PARTS; part++)
            row[part] = (Floats)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i*)(bytes + part * 2 * WIDTH)));
#else
        float values[LANES];
        widen(bytes, FLOAT16, 0, LANES, values);
        std::memcpy(row, values, sizeof row);
#endif
    }
}

template <int32_t dtype, bool scaled>
void square_rows(const Span& span, int64_t first, int64_t rows, Lanes& lanes) {
    const void* const grads = span.grad;
    const double* const scales = span.scales;
    const int64_t scale_count = span.scale_count;
    Doubles sums[PARTS];
    std::memcpy(sums, lanes.parts, sizeof sums);
    for (int64_t row = 0; row < rows; row++) {
        Floats values[PARTS];
        load_row<dtype>(grads, first + row * LANES, values);
        if constexpr (scaled)
            for (int64_t scale = 0; scale < scale_count; scale++)
                for (Floats& part : values) part *= static_cast<float>(scales[scale]);
        for (int part = 0; part < PARTS; part++) add_squares(sums[part], values[part]);
    }
    std::memcpy(lanes.parts, sums, sizeof sums);
}

template <int32_t dtype>
void square_block(const Span& span, int64_t first, Lanes& lanes) {
    (span.scale_count > 0 ? square_rows<dtype, true> : square_rows<dtype, false>)(span, first, ROWS, lanes);
}

double canonical_sum(double sum) { return sum == sum ? sum : bits<double>(uint64_t{0x7ff8000000000000}); }

}  // namespace
}  // namespace patrickstar
