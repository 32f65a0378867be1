// The arithmetic as plain loops, which the compiler vectorizes. This file is compiled once per instruction set, with
// PATRICKSTAR_LOOPS defined as the name of the variant. The operations and their order are those of `_kernels/adam.py`,
// `sgd.py` and `lion.py`. Each operation is correctly rounded (IEEE 754) and the build disables contraction, so all
// variants give the same bits as PyTorch's operators.

#include "codes.h"
#include "formats.h"
#include "packing.h"
#include "rules.h"
#include "spans.h"
#include "split.h"
#include "streams.h"
#include "sums.h"

#define PASTE(a, b) a##b
#define NAME(a, b) PASTE(a, b)
#define TEXT(a) #a
#define TEXT_OF(a) TEXT(a)

namespace patrickstar {
namespace {

// Elements that pass through all stages of an update while they are in the first-level cache.
constexpr int64_t STRIP = 512;
// Distance between the current strip and the memory being prefetched, in elements.
constexpr int64_t PREFETCH_DISTANCE = 4 * STRIP;

void load_gradient(const Span& span, int64_t first, int64_t count, float* __restrict grad) {
    widen(span.grad, span.grad_dtype, first, count, grad);
    if (span.accumulated != nullptr) {
        const float* __restrict accumulated = span.accumulated + first;
        for (int64_t i = 0; i < count; i++) grad[i] = accumulated[i] + grad[i];
    }
    for (int64_t scale = 0; scale < span.scale_count; scale++) {
        const float factor = static_cast<float>(span.scales[scale]);
        for (int64_t i = 0; i < count; i++) grad[i] *= factor;
    }
}

int64_t itemsize_of(int32_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

// True if the list stores codes of one byte.
bool is_coded(const Span& span, int list) { return span.rule == ADAM_8BIT && (list == STATE0 || list == STATE1); }

int64_t itemsize_of(const Span& span, int list) {
    if (is_coded(span, list)) return 1;
    return span.upper != nullptr && list == MASTER ? sizeof(uint16_t) : sizeof(float);
}

template <class To, class From>
To* at(From* list, int64_t first) {
    return reinterpret_cast<To*>(list) + first;
}

template <bool writes>
void prefetch_list(const void* list, int64_t itemsize, int64_t first, int64_t count) {
    const char* bytes = static_cast<const char*>(list) + first * itemsize;
    for (int64_t i = 0; i < count * itemsize; i += CACHE_LINE_BYTES) __builtin_prefetch(bytes + i, writes);
}

template <bool in_place>
void prefetch(const Span& span, int64_t first, int64_t count) {
    prefetch_list<in_place>(span.grad, itemsize_of(span.grad_dtype), first, count);
    if (span.upper != nullptr) prefetch_list<in_place>(span.upper, sizeof(uint16_t), first, count);
    for (int list = 0; list < LISTS; list++)
        if (span.lists[list] != nullptr)
            prefetch_list<in_place>(span.lists[list], itemsize_of(span, list), first, count);
}

// The operations of `_kernels/averaged.py`.
void move_average(const Span& span, int64_t count, float* const* lists) {
    const float* __restrict masters = lists[MASTER];
    float* __restrict averages = lists[AVERAGE];
    const float weight = static_cast<float>(span.average_weight);
    if (weight == 1.0f) {
        for (int64_t i = 0; i < count; i++) averages[i] = masters[i];
    } else if (weight < 0.5f) {
        for (int64_t i = 0; i < count; i++)
            averages[i] = canonical(averages[i] + (masters[i] - averages[i]) * weight);
    } else {
        const float change = weight - 1.0f;
        for (int64_t i = 0; i < count; i++) averages[i] = canonical(masters[i] + (masters[i] - averages[i]) * change);
    }
}

// Stores the new values of a strip in `out` and in the parameter.
void store_strip(const Span& span, int64_t first, int64_t count, float* const* lists) {
    for (int list = 0; list < LISTS; list++)
        if (lists[list] != nullptr && !is_coded(span, list))
            stream(span.out[list] + first, lists[list], count * sizeof(float));
    if (span.param == span.grad) {  // in the cache already
        round_into(span.param, span.param_dtype, first, count, lists[MASTER]);
    } else {
        alignas(64) uint16_t halves[2 * STRIP];
        const int64_t itemsize = itemsize_of(span.param_dtype);
        round_into(halves, span.param_dtype, 0, count, lists[MASTER]);
        stream(static_cast<char*>(span.param) + first * itemsize, halves, count * itemsize);
    }
}

template <bool in_place>
void update_page(const Span& span, int64_t first, int64_t count) {
    // Streamed stores are drained while the next strip is computed; longer strips make the processor wait for them.
    constexpr int64_t length = in_place ? STRIP : STRIP / 2;
    alignas(64) float grads[length], copies[LISTS][length];
    const bool coded = span.rule == ADAM_8BIT;
    float* const* targets = in_place ? span.lists : span.out;
    const int64_t end = first + count;
    for (int64_t start = first; start < end; start += length) {
        const int64_t next = start + PREFETCH_DISTANCE;
        if (next < span.numel) prefetch<in_place>(span, next, span.numel - next < length ? span.numel - next : length);
        const int64_t strip = end - start < length ? end - start : length;
        float* lists[LISTS] = {};
        for (int list = 0; list < LISTS; list++) {
            if (span.lists[list] == nullptr) continue;
            const bool copied = !in_place || is_coded(span, list);
            lists[list] = copied ? copies[list] : span.lists[list] + start;
            if (copied && !is_coded(span, list)) std::memcpy(lists[list], span.lists[list] + start, strip * sizeof(float));
        }
        if (coded)
            decode_states(at<const uint8_t>(span.lists[STATE0], start), at<const uint8_t>(span.lists[STATE1], start),
                          strip, lists[STATE0], lists[STATE1]);
        load_gradient(span, start, strip, grads);
        apply(span, strip, grads, lists);
        if (coded)
            encode_states(lists[MASTER], lists[STATE0], lists[STATE1], static_cast<float>(span.scalars[8]), strip,
                          at<uint8_t>(targets[STATE0], start), at<uint8_t>(targets[STATE1], start));
        if (lists[AVERAGE] != nullptr) move_average(span, strip, lists);
        if (in_place)
            round_into(span.param, span.param_dtype, start, strip, lists[MASTER]);
        else
            store_strip(span, start, strip, lists);
    }
    if (!in_place) finish_streams();
}

// Updates split masters: in memory in place, or in copies of a strip that then go to `out`.
template <bool in_place>
void update_split(const Span& span, int64_t first, int64_t count) {
    constexpr int64_t length = in_place ? STRIP : STRIP / 2;
    alignas(64) float grads[length], masters[length], copies[LISTS][length];
    alignas(64) uint16_t upper_copies[length], lower_copies[length];
    const int64_t end = first + count;
    for (int64_t start = first; start < end; start += length) {
        const int64_t next = start + PREFETCH_DISTANCE;
        if (next < span.numel) prefetch<in_place>(span, next, span.numel - next < length ? span.numel - next : length);
        const int64_t strip = end - start < length ? end - start : length;
        float* lists[LISTS] = {masters};
        for (int list = STATE0; list < LISTS; list++) {
            if (span.lists[list] == nullptr) continue;
            lists[list] = in_place ? span.lists[list] + start : copies[list];
            if (!in_place) std::memcpy(lists[list], span.lists[list] + start, strip * sizeof(float));
        }
        auto *uppers = at<uint16_t>(span.param, start), *lowers = at<uint16_t>(span.lists[MASTER], start);
        if (!in_place) {
            std::memcpy(lower_copies, lowers, strip * sizeof(uint16_t));
            uppers = upper_copies, lowers = lower_copies;
        }
        const auto* before = at<const uint16_t>(span.upper, start);
        if (uppers != before) std::memcpy(uppers, before, strip * sizeof(uint16_t));
        load_gradient(span, start, strip, grads);
        apply_split(span, strip, grads, uppers, lowers, lists);
        if (lists[AVERAGE] != nullptr) move_average(span, strip, lists);
        if (in_place) continue;
        stream(at<uint16_t>(span.param, start), uppers, strip * sizeof(uint16_t));
        stream(at<uint16_t>(span.out[MASTER], start), lowers, strip * sizeof(uint16_t));
        for (int list = STATE0; list < LISTS; list++)
            if (lists[list] != nullptr) stream(span.out[list] + start, lists[list], strip * sizeof(float));
    }
    if (!in_place) finish_streams();
}

void update(const Span& span, int64_t first, int64_t count) {
    if (span.upper != nullptr)
        return (span.out[MASTER] == nullptr ? update_split<true> : update_split<false>)(span, first, count);
    (span.out[MASTER] == nullptr ? update_page<true> : update_page<false>)(span, first, count);
}

// Adds the squares of any number of elements, with the last row padded with zeros.
void square_elements(const Span& span, int64_t first, int64_t count, Lanes& lanes) {
    alignas(64) float grads[STRIP];
    for (int64_t start = 0; start < count; start += STRIP) {
        const int64_t strip = count - start < STRIP ? count - start : STRIP;
        load_gradient(span, first + start, strip, grads);
        int64_t padded = strip;
        while (padded % LANES != 0) grads[padded++] = 0;
        Span scaled = span;
        scaled.grad = grads;
        square_rows<FLOAT32, false>(scaled, 0, padded / LANES, lanes);
    }
}

int64_t count_not_finite(const Span& span, int64_t first, int64_t count) {
    alignas(64) float grads[STRIP];
    int64_t not_finite = 0;
    for (int64_t start = 0; start < count; start += STRIP) {
        const int64_t strip = count - start < STRIP ? count - start : STRIP;
        load_gradient(span, first + start, strip, grads);
        for (int64_t i = 0; i < strip; i++) not_finite += !__builtin_isfinite(grads[i]);
    }
    return not_finite;
}

int64_t grad_stats(const Span& span, int64_t first, int64_t count, double* sums) {
    int64_t not_finite = 0;
    const int64_t end = first + count;
    for (int64_t start = first; start < end; start += BLOCK) {
        const int64_t block = end - start < BLOCK ? end - start : BLOCK;
        const bool direct = block == BLOCK && span.accumulated == nullptr;
        Lanes lanes{{}, direct && span.grad_dtype == BFLOAT16};
        if (!direct)
            square_elements(span, start, block, lanes);
        else if (span.grad_dtype == BFLOAT16)
            square_block<BFLOAT16>(span, start, lanes);
        else if (span.grad_dtype == FLOAT16)
            square_block<FLOAT16>(span, start, lanes);
        else
            square_block<FLOAT32>(span, start, lanes);
        const double sum = lanes.halve();
        *sums++ = canonical_sum(sum);
        // Squares of floats never overflow a double, so the sum is infinite or NaN only if an element is.
        if (!__builtin_isfinite(sum)) not_finite += count_not_finite(span, start, block);
    }
    return not_finite;
}

double fold(const double* values, int64_t count) {
    Lanes lanes{{}, false};
    for (int64_t i = 0; i < count; i++) lanes.parts[i % LANES / WIDTH][i % WIDTH] += values[i];
    return canonical_sum(lanes.halve());
}

uint64_t read(const uint64_t* words, int64_t count) {
    uint64_t combined = 0;
    for (int64_t i = 0; i < count; i++) combined ^= words[i];
    return combined;
}

bool runs_here() {
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2");  // implies F16C, which clang can't query
#else
    return true;
#endif
}

}  // namespace

extern const Loops NAME(loops_, PATRICKSTAR_LOOPS);
const Loops NAME(loops_, PATRICKSTAR_LOOPS) = {
    TEXT_OF(PATRICKSTAR_LOOPS), runs_here, update, grad_stats, fold, read, pack, unpack};

}  // namespace patrickstar
