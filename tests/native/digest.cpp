// Updates generated spans, computes their gradient statistics and prints one digest per case. `test_portability.py`
// requires the same output from every compiler, processor, instruction set and number of threads.

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#include "spans.h"

using namespace patrickstar;

// The library's functions, found in it by their names.
int64_t (*start)(const Span*, int64_t, const double*, int64_t, int, const char*, void**);
void (*finish)(void*);
int64_t (*grad_stats)(const Span*, int64_t, const double*, int64_t, int, const char*, double*, int64_t*);
const char* (*variant_name)(int);

namespace {

uint64_t state;

uint32_t random_word() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 33) * 2u ^ static_cast<uint32_t>(state >> 20);
}

// Any bits at all now and then: NaN, infinities, denormals. Mostly numbers of ordinary size.
float random_float(bool positive) {
    const uint32_t word = random_word();
    uint32_t bits = word % 8 == 0 ? random_word() : (word & 0x807fffffu) | (110u + random_word() % 20u) << 23;
    if (positive) bits &= 0x7fffffffu;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

std::vector<float> floats(int64_t numel, bool positive = false) {
    std::vector<float> values(numel);
    for (float& value : values) value = random_float(positive);
    return values;
}

std::vector<uint32_t> gradients(int64_t numel) {
    std::vector<uint32_t> words(numel);
    for (uint32_t& word : words) {
        const float one = random_float(false), two = random_float(false);
        uint32_t low, high;
        std::memcpy(&low, &one, 4);
        std::memcpy(&high, &two, 4);
        word = random_word() % 2 ? low : (low >> 16 | (high & 0xffff0000u));
    }
    return words;
}

void add(uint64_t& digest, const void* bytes, int64_t count) {
    for (int64_t i = 0; i < count; i++) digest = (digest ^ static_cast<const uint8_t*>(bytes)[i]) * 1099511628211u;
}

void run(int rule, int mode, bool light, int dtype, int64_t numel, int threads, const char* variant) {
    state = 1 + rule * 1000 + mode * 100 + dtype * 10 + numel;
    std::vector<uint32_t> grad = gradients(numel);
    std::vector<float> accumulated = floats(numel), master = floats(numel);
    std::vector<float> one = floats(numel), two = floats(numel, true);
    const double scales[] = {0.5, 0.3};
    const double hyper[3][SCALARS] = {
        {0.99999, light ? 0.1 : -0.3, 0.999, 0.001, 0.2, 1e-8, -1e-3, light ? 1.0 : 0.0},
        {0.01, 0.9, 0.7, -0.1, 1.0},
        {0.999, 0.9, 0.1, 0.99, 0.01, -1e-3},
    };
    Span span{};
    span.param = grad.data();
    span.grad = grad.data();
    span.accumulated = mode % 2 ? accumulated.data() : nullptr;
    span.lists[MASTER] = master.data();
    span.lists[STATE0] = one.data();
    span.lists[STATE1] = two.data();
    span.numel = numel;
    span.param_dtype = span.grad_dtype = dtype;
    span.rule = rule;
    span.mode = mode;
    std::memcpy(span.scalars, hyper[rule], sizeof span.scalars);
    double sum = 0;
    int64_t not_finite = 0;
    void* handle = nullptr;
    grad_stats(&span, 1, scales, dtype, threads, variant, &sum, &not_finite);
    start(&span, 1, scales, dtype, threads, variant, &handle);
    finish(handle);
    uint64_t digest = 14695981039346656037u;
    add(digest, &sum, sizeof sum);
    add(digest, grad.data(), numel * 4);
    for (const auto* list : {&master, &one, &two}) add(digest, list->data(), numel * 4);
    std::printf("%d %d %d %d %lld: %016llx %lld\n", rule, mode, light, dtype, static_cast<long long>(numel),
                static_cast<unsigned long long>(digest), static_cast<long long>(not_finite));
}

}  // namespace

// digest LIBRARY: the names of its variants. digest LIBRARY VARIANT THREADS: the digests.
int main(int argc, char** argv) {
    void* library = dlopen(argv[1], RTLD_NOW);
    if (library == nullptr) return std::puts(dlerror()), 1;
    const auto find = [&](auto& function, const char* name) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    };
    find(start, "patrickstar_start");
    find(finish, "patrickstar_finish");
    find(grad_stats, "patrickstar_grad_stats");
    find(variant_name, "patrickstar_variant");
    if (argc == 2) {
        for (int number = 0; variant_name(number) != nullptr; number++) std::puts(variant_name(number));
        return 0;
    }
    const int modes[] = {3, 5, 1};
    for (int rule = 0; rule < 3; rule++)
        for (int mode = 0; mode < modes[rule]; mode++)
            for (int dtype = 0; dtype < 3; dtype++)
                for (const int64_t numel : {1, 33, 4099, 20000})
                    for (const bool light : {true, false})
                        if (light || rule == 0) run(rule, mode, light, dtype, numel, std::atoi(argv[3]), argv[2]);
    run(0, 2, true, 1, 2 * (int64_t{1} << 20) + 5, std::atoi(argv[3]), argv[2]);
}
