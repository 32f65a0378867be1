// The C functions that `_kernels/cpp_backend.py` calls. Addresses and counts come in. What is allocated here are the list of
// pages and, for a survey, 8 bytes per block; where even that can't be had, the result says so.

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "pool.h"
#include "spans.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace patrickstar {

// The build has these variants and says so, the fastest first; every build has the baseline.
extern const Loops loops_avx512, loops_avx2, loops_baseline;

namespace {

const Loops* const VARIANTS[] = {
#ifdef PATRICKSTAR_HAS_avx512
    &loops_avx512,
#endif
#ifdef PATRICKSTAR_HAS_avx2
    &loops_avx2,
#endif
    &loops_baseline,
};

// A page of one span. Pages are numbered through all spans of a call.
struct Page {
    const Span* span;
    int64_t first;
    int64_t count;
    int64_t block;  // the number of its first BLOCK within its span
};

std::vector<Page> cut(const std::vector<Span>& spans) {
    std::vector<Page> pages;
    for (const Span& span : spans)
        for (int64_t first = 0; first < span.numel; first += PAGE)
            pages.push_back({&span, first, std::min(PAGE, span.numel - first), first / BLOCK});
    return pages;
}

int64_t blocks_of(int64_t numel) { return (numel + BLOCK - 1) / BLOCK; }

// The variant of that name, or the fastest for null; null for one that this machine does not run.
const Loops* loops_named(const char* name) {
    for (const Loops* loops : VARIANTS)
        if ((name == nullptr || std::strcmp(loops->name, name) == 0) && loops->runs_here()) return loops;
    return nullptr;
}

}  // namespace

// An update on its way. Owns copies of the spans and scales, not the memory that spans point at.
struct Running {
    std::vector<double> scales;
    std::vector<Span> spans;
    std::vector<Page> pages;
    std::shared_ptr<Job> job;

    Running(const Span* given, int64_t count, const double* factors, int64_t factor_count)
        : scales(factors, factors + factor_count), spans(given, given + count) {
        for (Span& span : spans) {
            span.scales = scales.data();
            span.scale_count = factor_count;
        }
        pages = cut(spans);
    }
};

enum Status : int64_t { DONE = 0, NO_VARIANT = -1, NO_MEMORY = -2 };

}  // namespace patrickstar

using namespace patrickstar;

// The name of variant `number`, the fastest first; null behind the last that this machine runs.
EXPORT const char* patrickstar_variant(int number) {
    for (const Loops* loops : VARIANTS)
        if (loops->runs_here() && number-- == 0) return loops->name;
    return nullptr;
}

EXPORT int64_t patrickstar_span_bytes() { return sizeof(Span); }

EXPORT const char* patrickstar_sources() { return PATRICKSTAR_SOURCES; }

EXPORT int patrickstar_pool_size() { return pool_size(); }

// Starts the update of `count` spans, all with the same scales; the memory that spans point at must stay until
// `patrickstar_finish`. What to give that is written to `handle`, before this returns.
EXPORT int64_t patrickstar_start(const Span* spans, int64_t count, const double* scales, int64_t scale_count,
                                 int threads, const char* variant, void** handle) {
    const Loops* loops = loops_named(variant);
    if (loops == nullptr) return NO_VARIANT;
    try {
        auto running = std::make_unique<Running>(spans, count, scales, scale_count);
        const Running* const seen = running.get();
        running->job = start(std::ssize(running->pages), threads, [seen, loops](int64_t number) {
            const Page& page = seen->pages[number];
            loops->update(*page.span, page.first, page.count);
        });
        *handle = running.release();
        return DONE;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

EXPORT void patrickstar_finish(void* handle) {
    auto* running = static_cast<Running*>(handle);
    finish(*running->job);
    delete running;
}

// Writes the sum of squares of each span's scaled gradient, and to `not_finite` how many elements are not finite.
EXPORT int64_t patrickstar_survey(const Span* spans, int64_t count, const double* scales, int64_t scale_count,
                                  int threads, const char* variant, double* sums, int64_t* not_finite) {
    const Loops* loops = loops_named(variant);
    if (loops == nullptr) return NO_VARIANT;
    try {
        const Running call(spans, count, scales, scale_count);
        std::vector<std::vector<double>> blocks;
        for (const Span& span : call.spans) blocks.emplace_back(blocks_of(span.numel));
        std::vector<int64_t> found(call.pages.size());
        finish(*start(std::ssize(call.pages), threads, [&](int64_t number) {
            const Page& page = call.pages[number];
            double* target = blocks[page.span - call.spans.data()].data() + page.block;
            found[number] = loops->survey(*page.span, page.first, page.count, target);
        }));
        const DefaultArithmetic guard;
        for (int64_t span = 0; span < count; span++)
            sums[span] = loops->fold(blocks[span].data(), std::ssize(blocks[span]));
        *not_finite = std::accumulate(found.begin(), found.end(), int64_t{0});
        return DONE;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

// Reads `count` words and does nothing else with them: what memory gives at most. Returns their exclusive or.
EXPORT uint64_t patrickstar_read(const uint64_t* words, int64_t count, int threads) {
    const int64_t pages = (count + PAGE - 1) / PAGE;
    std::vector<uint64_t> seen(pages);
    finish(*start(pages, threads, [&](int64_t page) {
        seen[page] = loops_named(nullptr)->read(words + page * PAGE, std::min(PAGE, count - page * PAGE));
    }));
    uint64_t all = 0;
    for (const uint64_t word : seen) all ^= word;
    return all;
}
