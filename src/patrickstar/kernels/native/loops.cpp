// The arithmetic, as plain loops that the compiler turns into vector code: compiled once per instruction set, with
// PATRICKSTAR_LOOPS as the variant's name. The operations and their order are those of `kernels/adam.py`, `sgd.py` and
// `lion.py`. Every one is a correctly rounded IEEE operation, and the build forbids to contract two into one, so all
// variants, and PyTorch's operators one by one, give the same bits.

#include <cstring>

#include "spans.h"

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#define PASTE(a, b) a##b
#define NAME(a, b) PASTE(a, b)
#define TEXT(a) #a
#define TEXT_OF(a) TEXT(a)

namespace patrickstar {
namespace {

// Elements that are taken through all stages of an update while they lie in the first-level cache.
constexpr int64_t STRIP = 512;
// How far ahead of the strip memory is asked for, in elements.
constexpr int64_t AHEAD = 2 * STRIP;
constexpr int64_t CACHE_LINE_BYTES = 64;

template <class To, class From>
inline To bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

// Hardware differs in which NaN an operation returns; what is stored is always the same one.
inline float canonical(float value) { return value != value ? bits<float>(0x7fc00000u) : value; }

inline float from_bfloat16(uint16_t half) { return bits<float>(uint32_t{half} << 16); }

inline uint16_t to_bfloat16(float value) {
    const uint32_t word = bits<uint32_t>(value);
    const uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;  // to nearest, ties to even
    return static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}

inline float from_float16(uint16_t half) {
    const uint32_t exponents = 0x7c00u << 13;
    uint32_t word = (half & 0x7fffu) << 13;
    const uint32_t exponent = word & exponents;
    word += (127 - 15) << 23;
    const uint32_t infinite = word + ((128 - 16) << 23);
    const uint32_t denormal = bits<uint32_t>(bits<float>(word + (1u << 23)) - bits<float>(113u << 23));
    word = exponent == exponents ? infinite : exponent == 0 ? denormal : word;
    return bits<float>(word | (uint32_t{half} & 0x8000u) << 16);
}

inline uint16_t to_float16(float value) {
    const uint32_t sign = bits<uint32_t>(value) & 0x80000000u;
    const uint32_t word = bits<uint32_t>(value) ^ sign;
    const uint32_t magic = ((127 - 15) + (23 - 10) + 1) << 23;  // adding it leaves a denormal's digits in place
    const uint32_t denormal = bits<uint32_t>(bits<float>(word) + bits<float>(magic)) - magic;
    const uint32_t normal = (word - ((127u - 15u) << 23) + 0xfffu + ((word >> 13) & 1u)) >> 13;
    const uint32_t large = word > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t half = word >= (143u << 23) ? large : word < (113u << 23) ? denormal : normal;
    return static_cast<uint16_t>(value != value ? 0x7e00u : (half | sign >> 16));
}

void widen(const void* source, int32_t dtype, int64_t first, int64_t count, float* __restrict out) {
    const auto* halves = static_cast<const uint16_t*>(source) + first;
    if (dtype == FLOAT32)
        std::memcpy(out, static_cast<const float*>(source) + first, count * sizeof(float));
    else if (dtype == BFLOAT16)
        for (int64_t i = 0; i < count; i++) out[i] = from_bfloat16(halves[i]);
    else
        for (int64_t i = 0; i < count; i++) out[i] = from_float16(halves[i]);
}

void round_into(void* target, int32_t dtype, int64_t first, int64_t count, const float* __restrict values) {
    auto* __restrict halves = static_cast<uint16_t*>(target) + first;
    if (dtype == FLOAT32)
        std::memcpy(static_cast<float*>(target) + first, values, count * sizeof(float));
    else if (dtype == BFLOAT16)
        for (int64_t i = 0; i < count; i++) halves[i] = to_bfloat16(values[i]);
    else
        for (int64_t i = 0; i < count; i++) halves[i] = to_float16(values[i]);
}

void load_gradient(const Span& span, int64_t first, int64_t count, float* __restrict grad) {
    widen(span.grad, span.grad_dtype, first, count, grad);
    if (span.earlier != nullptr) {
        const float* __restrict earlier = span.earlier + first;
        for (int64_t i = 0; i < count; i++) grad[i] = earlier[i] + grad[i];
    }
    for (int64_t scale = 0; scale < span.scale_count; scale++) {
        const float factor = span.scales[scale];
        for (int64_t i = 0; i < count; i++) grad[i] *= factor;
    }
}

// mode: 0 no weight decay, 1 L2, 2 decoupled.
template <int mode, bool light>
void adam(const float* scalars, int64_t count, float* __restrict grads, float* __restrict masters,
          float* __restrict exp_avgs, float* __restrict exp_avg_sqs) {
    const float decay = scalars[0], weight1 = scalars[1], beta2 = scalars[2], weight2 = scalars[3];
    const float correction2 = scalars[4], eps = scalars[5], minus_step_size = scalars[6];
    for (int64_t i = 0; i < count; i++) {
        float grad = grads[i], master = masters[i], exp_avg = exp_avgs[i];
        if (mode == 1) grad = grad + master * decay;
        if (mode == 2) master = master * decay;
        const float change = grad - exp_avg;
        exp_avg = light ? exp_avg + change * weight1 : grad + change * weight1;
        const float exp_avg_sq = exp_avg_sqs[i] * beta2 + grad * weight2 * grad;
        const float denominator = __builtin_sqrtf(exp_avg_sq) / correction2 + eps;
        masters[i] = canonical(master + exp_avg * minus_step_size / denominator);
        exp_avgs[i] = canonical(exp_avg);
        exp_avg_sqs[i] = canonical(exp_avg_sq);
    }
}

// mode: 0 no momentum, 1 the first gradient becomes the buffer, 2 momentum, 3 and 4 the same with Nesterov's.
template <int mode>
void sgd(const float* scalars, int64_t count, float* __restrict grads, float* __restrict masters,
         float* __restrict buffers) {
    const float decay = scalars[0], momentum = scalars[1], weight = scalars[2], minus_lr = scalars[3];
    const bool decays = scalars[4] != 0;
    for (int64_t i = 0; i < count; i++) {
        const float decayed = grads[i] + masters[i] * decay;
        const float grad = decays ? decayed : grads[i];
        float direction = grad;
        if (mode != 0) {
            const float buffer = mode == 1 || mode == 3 ? grad : buffers[i] * momentum + grad * weight;
            direction = mode >= 3 ? grad + buffer * momentum : buffer;
            buffers[i] = canonical(buffer);
        }
        masters[i] = canonical(masters[i] + direction * minus_lr);
    }
}

void lion(const float* scalars, int64_t count, float* __restrict grads, float* __restrict masters,
          float* __restrict exp_avgs) {
    const float decay = scalars[0], beta1 = scalars[1], weight1 = scalars[2];
    const float beta2 = scalars[3], weight2 = scalars[4], minus_lr = scalars[5];
    for (int64_t i = 0; i < count; i++) {
        const float direction = exp_avgs[i] * beta1 + grads[i] * weight1;
        const float sign = direction > 0 ? 1.0f : direction < 0 ? -1.0f : direction * 0.0f;
        masters[i] = canonical(masters[i] * decay + sign * minus_lr);
        exp_avgs[i] = canonical(exp_avgs[i] * beta2 + grads[i] * weight2);
    }
}

void apply(const Span& span, int64_t first, int64_t count, float* grads) {
    float* masters = span.master + first;
    float* one = span.states[0] != nullptr ? span.states[0] + first : nullptr;
    float* two = span.states[1] != nullptr ? span.states[1] + first : nullptr;
    const float* scalars = span.scalars;
    const int mode = span.mode;
    if (span.rule == ADAM) {
        const bool light = scalars[7] != 0;
        if (mode == 0) (light ? adam<0, true> : adam<0, false>)(scalars, count, grads, masters, one, two);
        if (mode == 1) (light ? adam<1, true> : adam<1, false>)(scalars, count, grads, masters, one, two);
        if (mode == 2) (light ? adam<2, true> : adam<2, false>)(scalars, count, grads, masters, one, two);
    } else if (span.rule == SGD) {
        if (mode == 0) sgd<0>(scalars, count, grads, masters, one);
        if (mode == 1) sgd<1>(scalars, count, grads, masters, one);
        if (mode == 2) sgd<2>(scalars, count, grads, masters, one);
        if (mode == 3) sgd<3>(scalars, count, grads, masters, one);
        if (mode == 4) sgd<4>(scalars, count, grads, masters, one);
    } else {
        lion(scalars, count, grads, masters, one);
    }
}

int64_t size_of(int32_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

void fetch(const void* list, int64_t itemsize, int64_t first, int64_t count) {
    const char* bytes = static_cast<const char*>(list) + first * itemsize;
    for (int64_t at = 0; at < count * itemsize; at += CACHE_LINE_BYTES) __builtin_prefetch(bytes + at, 1);
}

void prefetch(const Span& span, int64_t first, int64_t count) {
    fetch(span.grad, size_of(span.grad_dtype), first, count);
    fetch(span.master, sizeof(float), first, count);
    for (const float* state : span.states)
        if (state != nullptr) fetch(state, sizeof(float), first, count);
}

void update(const Span& span, int64_t first, int64_t count) {
    alignas(64) float grads[STRIP];
    const int64_t end = first + count;
    for (int64_t at = first; at < end; at += STRIP) {
        const int64_t ahead = at + AHEAD;
        if (ahead < span.numel) prefetch(span, ahead, span.numel - ahead < STRIP ? span.numel - ahead : STRIP);
        const int64_t strip = end - at < STRIP ? end - at : STRIP;
        load_gradient(span, at, strip, grads);
        apply(span, at, strip, grads);
        round_into(span.param, span.param_dtype, at, strip, span.master + at);
    }
}

// Sums of LANES in registers: as many parts as it takes, each as wide as the machine's registers for doubles.
#if defined(__AVX512F__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int PARTS = LANES / WIDTH;
typedef double Doubles __attribute__((vector_size(WIDTH * sizeof(double))));
typedef float Floats __attribute__((vector_size(WIDTH * sizeof(float))));
typedef uint32_t Words __attribute__((vector_size(WIDTH * sizeof(uint32_t))));

// Adds the squares. That of a float is exact in a double: fusing it with the addition changes nothing.
inline void add_squares(Doubles& sums, const Floats& values) {
#if defined(__AVX512F__)
    const __m512d wide = _mm512_cvtps_pd((__m256)values);
    sums = (Doubles)_mm512_fmadd_pd(wide, wide, (__m512d)sums);
#else
    const Doubles wide = __builtin_convertvector(values, Doubles);
    sums += wide * wide;
#endif
}

// Parts of a row in order, or `by_parity`: the even elements of each two parts, then the odd ones.
struct Lanes {
    Doubles parts[PARTS] = {};
    bool by_parity;

    // The sum of all lanes, halving: 16 to 16, 8 to 8, and so on, whichever way they lie.
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

// How far ahead of a row memory is asked for. Hardware looks ahead less far than one core needs to use all of it.
constexpr int64_t SURVEY_AHEAD_BYTES = 16384;

template <int32_t dtype>
inline void load_row(const void* grads, int64_t at, Floats (&row)[PARTS]) {
    const char* bytes = static_cast<const char*>(grads) + at * (dtype == FLOAT32 ? 4 : 2);
    __builtin_prefetch(bytes + SURVEY_AHEAD_BYTES);
    if constexpr (dtype == FLOAT32) {
        __builtin_prefetch(bytes + SURVEY_AHEAD_BYTES + CACHE_LINE_BYTES);
        std::memcpy(row, bytes, sizeof row);
    } else if constexpr (dtype == BFLOAT16) {
        for (int part = 0; part < PARTS; part += 2) {  // two halves to a word: the even elements are the low ones
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
void square_rows(const Span& span, int64_t at, int64_t rows, Lanes& lanes) {
    const void* const grads = span.grad;
    const float* const scales = span.scales;
    const int64_t scale_count = span.scale_count;
    Doubles sums[PARTS];
    std::memcpy(sums, lanes.parts, sizeof sums);
    for (int64_t row = 0; row < rows; row++) {
        Floats values[PARTS];
        load_row<dtype>(grads, at + row * LANES, values);
        if constexpr (scaled)
            for (int64_t scale = 0; scale < scale_count; scale++)
                for (Floats& part : values) part *= scales[scale];
        for (int part = 0; part < PARTS; part++) add_squares(sums[part], values[part]);
    }
    std::memcpy(lanes.parts, sums, sizeof sums);
}

template <int32_t dtype>
void square_block(const Span& span, int64_t at, Lanes& lanes) {
    (span.scale_count > 0 ? square_rows<dtype, true> : square_rows<dtype, false>)(span, at, ROWS, lanes);
}

// Any number of elements, the last row filled up with zeros.
void square_some(const Span& span, int64_t first, int64_t count, Lanes& lanes) {
    alignas(64) float grads[STRIP];
    for (int64_t at = 0; at < count; at += STRIP) {
        const int64_t strip = count - at < STRIP ? count - at : STRIP;
        load_gradient(span, first + at, strip, grads);
        int64_t padded = strip;
        while (padded % LANES != 0) grads[padded++] = 0;
        Span scaled = span;
        scaled.grad = grads;
        square_rows<FLOAT32, false>(scaled, 0, padded / LANES, lanes);
    }
}

int64_t count_not_finite(const Span& span, int64_t first, int64_t count) {
    alignas(64) float grads[STRIP];
    int64_t found = 0;
    for (int64_t at = 0; at < count; at += STRIP) {
        const int64_t strip = count - at < STRIP ? count - at : STRIP;
        load_gradient(span, first + at, strip, grads);
        for (int64_t i = 0; i < strip; i++) found += !__builtin_isfinite(grads[i]);
    }
    return found;
}

double canonical_sum(double sum) { return sum == sum ? sum : bits<double>(uint64_t{0x7ff8000000000000}); }

int64_t survey(const Span& span, int64_t first, int64_t count, double* sums) {
    int64_t not_finite = 0;
    const int64_t end = first + count;
    for (int64_t at = first; at < end; at += BLOCK) {
        const int64_t block = end - at < BLOCK ? end - at : BLOCK;
        const bool direct = block == BLOCK && span.earlier == nullptr;
        Lanes lanes{{}, direct && span.grad_dtype == BFLOAT16};
        if (!direct)
            square_some(span, at, block, lanes);
        else if (span.grad_dtype == BFLOAT16)
            square_block<BFLOAT16>(span, at, lanes);
        else if (span.grad_dtype == FLOAT16)
            square_block<FLOAT16>(span, at, lanes);
        else
            square_block<FLOAT32>(span, at, lanes);
        const double sum = lanes.halve();
        *sums++ = canonical_sum(sum);
        // Squares of floats never overflow a double: a sum is infinite or NaN where an element is.
        if (!__builtin_isfinite(sum)) not_finite += count_not_finite(span, at, block);
    }
    return not_finite;
}

double fold(const double* values, int64_t count) {
    Lanes lanes{{}, false};
    for (int64_t i = 0; i < count; i++) lanes.parts[i % LANES / WIDTH][i % WIDTH] += values[i];
    return canonical_sum(lanes.halve());
}

uint64_t read(const uint64_t* words, int64_t count) {
    uint64_t seen = 0;
    for (int64_t i = 0; i < count; i++) seen ^= words[i];
    return seen;
}

bool runs_here() {
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2");  // whoever has it has F16C, which clang can't ask for
#else
    return true;
#endif
}

}  // namespace

extern const Loops NAME(loops_, PATRICKSTAR_LOOPS);
const Loops NAME(loops_, PATRICKSTAR_LOOPS) = {TEXT_OF(PATRICKSTAR_LOOPS), runs_here, update, survey, fold, read};

}  // namespace patrickstar
