// The update rules for a strip of elements: the operations of `_kernels/adam.py`, `sgd.py`, `lion.py` and
// `schedule_free.py`, in the same order. Included by `loops.cpp`, which is compiled once per instruction set.
#pragma once

#include "formats.h"
#include "split.h"

namespace patrickstar {
namespace {

// mode: 0 no weight decay, 1 L2, 2 decoupled.
template <int mode, bool light>
inline void adam_element(const float* scalars, float grad, float& master, float& exp_avg, float& exp_avg_sq) {
    const float decay = scalars[0], weight1 = scalars[1], beta2 = scalars[2], weight2 = scalars[3];
    const float correction2 = scalars[4], eps = scalars[5], minus_step_size = scalars[6];
    if (mode == 1) grad = grad + master * decay;
    if (mode == 2) master = master * decay;
    const float change = grad - exp_avg;
    const float average = light ? exp_avg + change * weight1 : grad + change * weight1;
    const float square = exp_avg_sq * beta2 + grad * weight2 * grad;
    const float denominator = __builtin_sqrtf(square) / correction2 + eps;
    master = canonical(master + average * minus_step_size / denominator);
    exp_avg = canonical(average);
    exp_avg_sq = canonical(square);
}

template <int mode, bool light>
void adam(const float* scalars, int64_t count, float* __restrict grads, float* __restrict masters,
          float* __restrict exp_avgs, float* __restrict exp_avg_sqs) {
    float numbers[SCALARS];
    std::memcpy(numbers, scalars, sizeof(numbers));
    for (int64_t i = 0; i < count; i++)
        adam_element<mode, light>(numbers, grads[i], masters[i], exp_avgs[i], exp_avg_sqs[i]);
}

// The same for split masters of which none is a tie, in one pass. Also stores the new masters.
template <int mode, bool light>
void adam_split(const float* scalars, int64_t count, float* __restrict grads, uint16_t* __restrict uppers,
                uint16_t* __restrict lowers, float* __restrict masters, float* __restrict exp_avgs,
                float* __restrict exp_avg_sqs) {
    float numbers[SCALARS];
    std::memcpy(numbers, scalars, sizeof(numbers));
    for (int64_t i = 0; i < count; i++) {
        float master = join_untied(uppers[i], lowers[i]);
        adam_element<mode, light>(numbers, grads[i], master, exp_avgs[i], exp_avg_sqs[i]);
        uppers[i] = upper_of(master);
        lowers[i] = lower_of(master);
        masters[i] = master;
    }
}

// mode: 0 no momentum, 1 the first gradient initializes the buffer, 2 momentum, 3 and 4 like 1 and 2 with Nesterov.
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

template <bool decays, bool light, bool first>
void schedule_free(const float* scalars, int64_t count, float* __restrict grads, float* __restrict masters,
                   float* __restrict zs, float* __restrict exp_avg_sqs) {
    const float decay = scalars[0], beta2 = scalars[1], weight2 = scalars[2], correction2 = scalars[3];
    const float eps = scalars[4], weight = scalars[5], step_of_y = scalars[6], minus_lr = scalars[7];
    for (int64_t i = 0; i < count; i++) {
        const float grad = grads[i], master = masters[i], z = first ? master : zs[i];
        const float exp_avg_sq = exp_avg_sqs[i] * beta2 + grad * weight2 * grad;
        float direction = grad / (__builtin_sqrtf(exp_avg_sq / correction2) + eps);
        if (decays) direction = direction + master * decay;
        const float moved = (z - master) * weight;
        const float interpolated = light ? master + moved : z + moved;
        masters[i] = canonical(interpolated + direction * step_of_y);
        zs[i] = canonical(z + direction * minus_lr);
        exp_avg_sqs[i] = canonical(exp_avg_sq);
    }
}

using Loop = void (*)(const float*, int64_t, float*, float*, float*, float*);

void apply(const Span& span, int64_t count, float* grads, float* const* lists) {
    float *masters = lists[MASTER], *state0 = lists[STATE0], *state1 = lists[STATE1];
    float scalars[SCALARS];
    for (int i = 0; i < SCALARS; i++) scalars[i] = static_cast<float>(span.scalars[i]);
    const int mode = span.mode;
    if (span.rule == ADAM || span.rule == ADAM_8BIT) {
        const bool light = scalars[7] != 0;
        if (mode == 0) (light ? adam<0, true> : adam<0, false>)(scalars, count, grads, masters, state0, state1);
        if (mode == 1) (light ? adam<1, true> : adam<1, false>)(scalars, count, grads, masters, state0, state1);
        if (mode == 2) (light ? adam<2, true> : adam<2, false>)(scalars, count, grads, masters, state0, state1);
    } else if (span.rule == SGD) {
        if (mode == 0) sgd<0>(scalars, count, grads, masters, state0);
        if (mode == 1) sgd<1>(scalars, count, grads, masters, state0);
        if (mode == 2) sgd<2>(scalars, count, grads, masters, state0);
        if (mode == 3) sgd<3>(scalars, count, grads, masters, state0);
        if (mode == 4) sgd<4>(scalars, count, grads, masters, state0);
    } else if (span.rule == SCHEDULE_FREE) {
        // By mode: 1 weight decay, 2 interpolates from the master, 4 first step.
        constexpr Loop loops[8] = {
            schedule_free<false, false, false>, schedule_free<true, false, false>, schedule_free<false, true, false>,
            schedule_free<true, true, false>,   schedule_free<false, false, true>, schedule_free<true, false, true>,
            schedule_free<false, true, true>,   schedule_free<true, true, true>,
        };
        loops[mode](scalars, count, grads, masters, state0, state1);
    } else {
        lion(scalars, count, grads, masters, state0);
    }
}

// Updates split masters in place, and stores the new ones in `lists[MASTER]`, too.
void apply_split(const Span& span, int64_t count, float* grads, uint16_t* uppers, uint16_t* lowers,
                 float* const* lists) {
    float *masters = lists[MASTER], *state0 = lists[STATE0], *state1 = lists[STATE1];
    const bool ties = has_ties(lowers, count);
    // GCC converts between 16 and 32 bits better in a loop of its own, but for AVX-512.
    if (ONE_PASS && !ties) {
        float scalars[SCALARS];
        for (int i = 0; i < SCALARS; i++) scalars[i] = static_cast<float>(span.scalars[i]);
        const bool light = scalars[7] != 0;
        const auto loop = span.mode == 0   ? (light ? adam_split<0, true> : adam_split<0, false>)
                          : span.mode == 1 ? (light ? adam_split<1, true> : adam_split<1, false>)
                                           : (light ? adam_split<2, true> : adam_split<2, false>);
        loop(scalars, count, grads, uppers, lowers, masters, state0, state1);
    } else {
        if (ties)
            join_marked(uppers, lowers, count, masters, state1);
        else
            for (int64_t i = 0; i < count; i++) masters[i] = join_untied(uppers[i], lowers[i]);
        apply(span, count, grads, lists);
        for (int64_t i = 0; i < count; i++) uppers[i] = upper_of(masters[i]);
        for (int64_t i = 0; i < count; i++) lowers[i] = lower_of(masters[i]);
    }
    if (has_ties(lowers, count)) mark_ties(masters, count, state1);
}

}  // namespace
}  // namespace patrickstar
