// Non-temporal stores: they write whole cache lines past the caches, so the processor does not first read what they
// overwrite. Included by `loops.cpp`, which is compiled once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "spans.h"

namespace patrickstar {
namespace {

// Copies one cache line; `target` must be aligned to it.
inline void stream_line(char* target, const char* source) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target), _mm512_loadu_si512(source));
#elif defined(__AVX2__)
    const auto* halves = reinterpret_cast<const __m256i*>(source);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target), _mm256_loadu_si256(halves));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target) + 1, _mm256_loadu_si256(halves + 1));
#else
    std::memcpy(target, source, CACHE_LINE_BYTES);
#endif
}

// Copies bytes. Lines that `target` covers only in part, at its ends, are stored as usual.
void stream(void* target, const void* source, int64_t nbytes) {
    auto* to = static_cast<char*>(target);
    const auto* from = static_cast<const char*>(source);
    int64_t head = -reinterpret_cast<intptr_t>(to) & (CACHE_LINE_BYTES - 1);
    if (head > nbytes) head = nbytes;
    std::memcpy(to, from, head);
    int64_t i = head;
    for (; i + CACHE_LINE_BYTES <= nbytes; i += CACHE_LINE_BYTES) stream_line(to + i, from + i);
    std::memcpy(to + i, from + i, nbytes - i);
}

// Makes all streamed bytes visible to other threads before any later store.
inline void finish_streams() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

}  // namespace
}  // namespace patrickstar
