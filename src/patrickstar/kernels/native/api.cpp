// The C functions that `kernels/native.py` calls. Addresses and counts come in; nothing here allocates more than a few
// bytes per page, nothing throws across the boundary.

#include <algorithm>
#include <cstring>
#include <iterator>
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

// An update on its way. Owns copies of the spans, not the memory they point at.
struct Running {
    std::vector<Span> spans;
    std::vector<Page> pages;
    std::shared_ptr<Job> job;
};

}  // namespace patrickstar

using namespace patrickstar;

// The name of variant `number`, the fastest first; null behind the last that this machine runs.
EXPORT const char* patrickstar_variant(int number) {
    for (const Loops* loops : VARIANTS)
        if (loops->runs_here() && number-- == 0) return loops->name;
    return nullptr;
}

EXPORT int64_t patrickstar_span_bytes() { return sizeof(Span); }

EXPORT int patrickstar_pool_size() { return pool_size(); }

// Starts the update of `count` spans; the memory they point at must stay until `patrickstar_finish`.
EXPORT void* patrickstar_start(const Span* spans, int64_t count, int threads, const char* variant) {
    const Loops* loops = loops_named(variant);
    if (loops == nullptr) return nullptr;
    auto* running = new Running{{spans, spans + count}, {}, {}};
    running->pages = cut(running->spans);
    running->job = start(std::ssize(running->pages), threads, [running, loops](int64_t number) {
        const Page& page = running->pages[number];
        loops->update(*page.span, page.first, page.count);
    });
    return running;
}

EXPORT void patrickstar_finish(void* handle) {
    auto* running = static_cast<Running*>(handle);
    finish(*running->job);
    delete running;
}

// Writes the sum of squares of each span's scaled gradient; returns how many elements are not finite, -1 for a variant
// that this machine does not run.
EXPORT int64_t patrickstar_survey(const Span* spans, int64_t count, int threads, const char* variant, double* sums) {
    const Loops* loops = loops_named(variant);
    if (loops == nullptr) return -1;
    const std::vector<Span> all(spans, spans + count);
    const std::vector<Page> pages = cut(all);
    std::vector<std::vector<double>> blocks;
    for (const Span& span : all) blocks.emplace_back(blocks_of(span.numel));
    std::vector<int64_t> not_finite(pages.size());
    finish(*start(std::ssize(pages), threads, [&](int64_t number) {
        const Page& page = pages[number];
        double* target = blocks[page.span - all.data()].data() + page.block;
        not_finite[number] = loops->survey(*page.span, page.first, page.count, target);
    }));
    for (int64_t span = 0; span < count; span++) sums[span] = loops->fold(blocks[span].data(), std::ssize(blocks[span]));
    int64_t total = 0;
    for (const int64_t found : not_finite) total += found;
    return total;
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
