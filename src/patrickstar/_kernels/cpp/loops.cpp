// The arithmetic, as plain loops that the compiler turns into vector code: compiled once per instruction set, with
// PATRICKSTAR_LOOPS as the variant's name. The operations and their order are those of `_kernels/adam.py`, `sgd.py` and
// `lion.py`. Every one is a correctly rounded IEEE operation, and the build forbids to contract two into one, so all
// variants, and PyTorch's operators one by one, give the same bits.

#include "formats.h"
#include "rules.h"
#include "spans.h"
#include "sums.h"

#define PASTE(a, b) a##b
#define NAME(a, b) PASTE(a, b)
#define TEXT(a) #a
#define TEXT_OF(a) TEXT(a)

namespace patrickstar {
namespace {

// Elements that are taken through all stages of an update while they lie in the first-level cache.
constexpr int64_t STRIP = 512;
// How far ahead of the strip memory is asked for, in elements.
constexpr int64_t AHEAD = 4 * STRIP;

void load_gradient(const Span& span, int64_t first, int64_t count, float* __restrict grad) {
    widen(span.grad, span.grad_dtype, first, count, grad);
    if (span.earlier != nullptr) {
        const float* __restrict earlier = span.earlier + first;
        for (int64_t i = 0; i < count; i++) grad[i] = earlier[i] + grad[i];
    }
    for (int64_t scale = 0; scale < span.scale_count; scale++) {
        const float factor = static_cast<float>(span.scales[scale]);
        for (int64_t i = 0; i < count; i++) grad[i] *= factor;
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
