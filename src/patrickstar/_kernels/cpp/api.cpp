// C functions called by `_kernels/cpp_backend.py`. They take addresses and counts. They allocate only the list of pieces
// and, for gradient statistics, 8 bytes per block; if that fails, they return NO_MEMORY.

#include <algorithm>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "pool.h"
#include "spans.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace patrickstar {

// The build defines which variants exist, fastest first. Every build has the baseline.
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

// A piece of one span. Pieces are numbered consecutively over all spans of a call.
struct Piece {
    const Span* span;
    int64_t first;
    int64_t count;
    int64_t block;  // index of its first BLOCK within the span
};

std::vector<Piece> split_into_pieces(const std::vector<Span>& spans) {
    std::vector<Piece> pieces;
    for (const Span& span : spans)
        for (int64_t first = 0; first < span.numel; first += PIECE)
            pieces.push_back({&span, first, std::min(PIECE, span.numel - first), first / BLOCK});
    return pieces;
}

int64_t block_count(int64_t numel) { return (numel + BLOCK - 1) / BLOCK; }

// Returns the variant with this name, or the fastest one if `name` is null. Returns null if this machine lacks it.
const Loops* loops_named(const char* name) {
    for (const Loops* loops : VARIANTS)
        if ((name == nullptr || std::strcmp(loops->name, name) == 0) && loops->runs_here()) return loops;
    return nullptr;
}

}  // namespace

// A running update. Owns copies of the spans and scales, but not the memory that the spans point to.
struct Running {
    std::vector<double> scales;
    std::vector<Span> spans;
    std::vector<Piece> pieces;
    std::shared_ptr<Job> job;

    Running(const Span* first_span, int64_t count, const double* first_scale, int64_t scale_count)
        : scales(first_scale, first_scale + scale_count), spans(first_span, first_span + count) {
        for (Span& span : spans) {
            span.scales = scales.data();
            span.scale_count = scale_count;
        }
        pieces = split_into_pieces(spans);
    }
};

std::function<void(int64_t)> updating(const Running& update, const Loops& loops) {
    return [&update, &loops](int64_t number) {
        const Piece& piece = update.pieces[number];
        loops.update(*piece.span, piece.first, piece.count);
    };
}

enum Status : int64_t { DONE = 0, NO_VARIANT = -1, NO_MEMORY = -2 };

}  // namespace patrickstar

using namespace patrickstar;

// Returns the name of variant `number`, fastest first, or null after the last one that this machine supports.
EXPORT const char* patrickstar_variant(int number) {
    for (const Loops* loops : VARIANTS)
        if (loops->runs_here() && number-- == 0) return loops->name;
    return nullptr;
}

EXPORT int64_t patrickstar_span_bytes() { return sizeof(Span); }

EXPORT const char* patrickstar_sources() { return PATRICKSTAR_SOURCES; }

EXPORT int patrickstar_pool_size() { return pool_size(); }

// Starts the update of `count` spans with the same scales, and stores the argument of `patrickstar_finish` in `handle`.
// The memory that the spans point to must stay valid until `patrickstar_finish` returns.
EXPORT int64_t patrickstar_start(const Span* spans, int64_t count, const double* scales, int64_t scale_count,
                                 int threads, const char* variant, void** handle) {
    const Loops* loops = loops_named(variant);
    if (loops == nullptr) return NO_VARIANT;
    try {
        auto running = std::make_unique<Running>(spans, count, scales, scale_count);
        running->job = start(std::ssize(running->pieces), threads, updating(*running, *loops));
        *handle = running.release();
        return DONE;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

EXPORT void patrickstar_finish(void* handle) {
    auto* running = static_cast<Running*>(handle);
    finish(running->job);
    delete running;
}

// Updates `count` spans with the same scales.
EXPORT int64_t patrickstar_update(const Span* spans, int64_t count, const double* scales, int64_t scale_count,
                                  int threads, const char* variant) {
    const Loops* loops = loops_named(variant);
    if (loops == nullptr) return NO_VARIANT;
    try {
        const Running call(spans, count, scales, scale_count);
        run(std::ssize(call.pieces), threads, updating(call, *loops));
        return DONE;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

// Stores the sum of squares of each span's scaled gradient in `sums`, and the number of non-finite elements in
// `not_finite`.
EXPORT int64_t patrickstar_grad_stats(const Span* spans, int64_t count, const double* scales, int64_t scale_count,
                                      int threads, const char* variant, double* sums, int64_t* not_finite) {
    const Loops* loops = loops_named(variant);
    if (loops == nullptr) return NO_VARIANT;
    try {
        const Running call(spans, count, scales, scale_count);
        std::vector<std::vector<double>> blocks;
        for (const Span& span : call.spans) blocks.emplace_back(block_count(span.numel));
        std::vector<int64_t> counts(call.pieces.size());
        run(std::ssize(call.pieces), threads, [&](int64_t number) {
            const Piece& piece = call.pieces[number];
            double* target = blocks[piece.span - call.spans.data()].data() + piece.block;
            counts[number] = loops->grad_stats(*piece.span, piece.first, piece.count, target);
        });
        const DefaultArithmetic guard;
        for (int64_t span = 0; span < count; span++)
            sums[span] = loops->fold(blocks[span].data(), std::ssize(blocks[span]));
        *not_finite = std::accumulate(counts.begin(), counts.end(), int64_t{0});
        return DONE;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

// Reads `count` words to measure memory bandwidth. Returns their exclusive or, which keeps the reads from being
// optimized away.
EXPORT uint64_t patrickstar_read(const uint64_t* words, int64_t count, int threads) {
    const Loops* const loops = loops_named(nullptr);
    const int64_t pieces = (count + PIECE - 1) / PIECE;
    std::vector<uint64_t> results(pieces);
    run(pieces, threads, [&](int64_t piece) {
        results[piece] = loops->read(words + piece * PIECE, std::min(PIECE, count - piece * PIECE));
    });
    uint64_t combined = 0;
    for (const uint64_t word : results) combined ^= word;
    return combined;
}

// Packs a page of fp32 words into `out`. Returns its bytes, or -1 if it has more than `capacity`.
EXPORT int64_t patrickstar_pack(const uint32_t* words, int64_t numel, uint8_t* out, int64_t capacity,
                                const char* variant) {
    return loops_named(variant)->pack(words, numel, out, capacity);
}

// Restores a page from `length` bytes that `patrickstar_pack` stored. Returns 0, or -1 if they hold no such page.
EXPORT int64_t patrickstar_unpack(const uint8_t* packed, int64_t length, uint32_t* words, int64_t numel,
                                  const char* variant) {
    return loops_named(variant)->unpack(packed, length, words, numel);
}
