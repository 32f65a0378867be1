// Lossless packing of fp32 pages into 7/8 of their bytes. Of a float, sign and significand are stored as they are, and
// of its exponent 4 bits: the distance from the largest one of its group. See [Note: packed pages] in
// `_tiers/page_codec.py`. Included by `loops.cpp`, which is compiled once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "spans.h"

namespace patrickstar {
namespace {

constexpr int64_t GROUP = 256;           // elements with one largest exponent
constexpr uint8_t LISTED = 14, ZERO = 15;  // codes: the exponent is in the list at the end; it is 0

// Where the parts of a packed page begin. Its first word is the number of listed exponents.
struct PackedPage {
    int64_t lows, mids, codes, tops, listed;

    explicit PackedPage(int64_t numel) {
        const int64_t groups = (numel + GROUP - 1) / GROUP;
        lows = CACHE_LINE_BYTES;
        mids = lows + 2 * numel;
        codes = mids + numel;
        tops = codes + groups * (GROUP / 2);
        listed = tops + groups;
    }
};

// Stores the positions of the elements of a group whose exponents are listed. Returns their number.
inline int find_listed(const uint8_t* code, uint8_t* positions) {
    constexpr uint64_t EACH = 0x0101010101010101u;
    int count = 0;
    for (int first = 0; first < GROUP; first += 8) {
        uint64_t eight;
        std::memcpy(&eight, code + first, sizeof(eight));
        // No code has more than 4 bits, so that no sum of a byte exceeds it.
        for (uint64_t hits = ~((eight ^ LISTED * EACH) + 0x7f * EACH) & 0x80 * EACH; hits != 0; hits &= hits - 1)
            positions[count++] = static_cast<uint8_t>(first + __builtin_ctzll(hits) / 8);
    }
    return count;
}

// Stores the parts of one group; `code` receives the codes. Returns the largest exponent.
inline uint8_t pack_group(const uint32_t* __restrict words, uint16_t* __restrict lows, uint8_t* __restrict mids,
                          uint8_t* __restrict codes, uint8_t* __restrict code) {
    alignas(64) uint16_t highs[GROUP];  // half the bits of a word: twice as many fit a vector
    uint16_t largest = 0;
    for (int i = 0; i < GROUP; i++) {
        lows[i] = static_cast<uint16_t>(words[i]);
        highs[i] = static_cast<uint16_t>(words[i] >> 16);
    }
    for (int i = 0; i < GROUP; i++) {
        const uint16_t magnitude = highs[i] & 0x7fffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const uint16_t top = largest >> 7;
    for (int i = 0; i < GROUP; i++) {
        const uint16_t high = highs[i], exponent = high >> 7 & 255u, distance = top - exponent;
        const uint16_t near = distance < LISTED ? distance : uint16_t{LISTED};
        mids[i] = static_cast<uint8_t>((high & 0x7fu) | (high >> 15) << 7);
        code[i] = static_cast<uint8_t>(exponent == 0 ? uint16_t{ZERO} : near);
    }
    for (int i = 0; i < GROUP / 2; i++) codes[i] = static_cast<uint8_t>(code[i] | code[i + GROUP / 2] << 4);
    return static_cast<uint8_t>(top);
}

// Packs a page into `out`. Returns its bytes, or -1 if it has more than `capacity`.
int64_t pack(const uint32_t* words, int64_t numel, uint8_t* out, int64_t capacity) {
    const PackedPage page(numel);
    if (page.listed > capacity) return -1;
    uint8_t *listed = out + page.listed, *const end = out + capacity;
    alignas(64) uint32_t padded[GROUP];
    alignas(64) uint16_t last_lows[GROUP];
    alignas(64) uint8_t last_mids[GROUP], code[GROUP], positions[GROUP];
    for (int64_t first = 0, group = 0; first < numel; first += GROUP, group++) {
        auto* lows = reinterpret_cast<uint16_t*>(out + page.lows) + first;
        uint8_t *const mids = out + page.mids + first, *const codes = out + page.codes + group * (GROUP / 2);
        const int64_t count = numel - first < GROUP ? numel - first : GROUP;
        if (count == GROUP) {
            out[page.tops + group] = pack_group(words + first, lows, mids, codes, code);
        } else {
            std::memset(padded, 0, sizeof(padded));
            std::memcpy(padded, words + first, count * sizeof(uint32_t));
            out[page.tops + group] = pack_group(padded, last_lows, last_mids, codes, code);
            std::memcpy(lows, last_lows, count * sizeof(uint16_t));
            std::memcpy(mids, last_mids, count);
        }
        const int more = find_listed(code, positions);
        if (end - listed < more) return -1;
        for (int i = 0; i < more; i++) *listed++ = static_cast<uint8_t>(words[first + positions[i]] >> 23);
    }
    const auto count = static_cast<uint32_t>(listed - out - page.listed);
    std::memset(out, 0, CACHE_LINE_BYTES);
    std::memcpy(out, &count, sizeof(count));
    return listed - out;
}

// Restores one group from its parts; `code` receives the codes.
inline void unpack_group(uint16_t top, const uint16_t* __restrict lows, const uint8_t* __restrict mids,
                         const uint8_t* __restrict codes, uint32_t* __restrict words, uint8_t* __restrict code) {
    for (int i = 0; i < GROUP / 2; i++) {
        code[i] = codes[i] & 15u;
        code[i + GROUP / 2] = codes[i] >> 4;
    }
    alignas(64) uint16_t highs[GROUP];
    for (int i = 0; i < GROUP; i++) {
        const uint16_t mid = mids[i], distance = code[i], near = (top - distance) & 255u;
        const uint16_t exponent = distance == ZERO ? uint16_t{0} : near;
        highs[i] = static_cast<uint16_t>((mid & 0x7fu) | exponent << 7 | (mid >> 7) << 15);
    }
    for (int i = 0; i < GROUP; i++) words[i] = lows[i] | uint32_t{highs[i]} << 16;
}

// Restores a page from the first `length` bytes of `packed`. Returns 0, or -1 if they hold no page of so many elements.
int64_t unpack(const uint8_t* packed, int64_t length, uint32_t* words, int64_t numel) {
    const PackedPage page(numel);
    uint32_t count = 0;
    if (length < page.listed) return -1;
    std::memcpy(&count, packed, sizeof(count));
    if (count > length - page.listed) return -1;
    const uint8_t *listed = packed + page.listed, *const end = listed + count;
    alignas(64) uint32_t padded[GROUP];
    alignas(64) uint16_t last_lows[GROUP] = {};
    alignas(64) uint8_t last_mids[GROUP] = {}, code[GROUP], positions[GROUP];
    for (int64_t first = 0, group = 0; first < numel; first += GROUP, group++) {
        const auto* lows = reinterpret_cast<const uint16_t*>(packed + page.lows) + first;
        const uint8_t *const mids = packed + page.mids + first, *const codes = packed + page.codes + group * (GROUP / 2);
        const int64_t rest = numel - first < GROUP ? numel - first : GROUP;
        uint32_t* const target = rest == GROUP ? words + first : padded;
        if (rest == GROUP) {
            unpack_group(packed[page.tops + group], lows, mids, codes, target, code);
        } else {
            std::memcpy(last_lows, lows, rest * sizeof(uint16_t));
            std::memcpy(last_mids, mids, rest);
            unpack_group(packed[page.tops + group], last_lows, last_mids, codes, target, code);
        }
        const int more = find_listed(code, positions);
        if (end - listed < more) return -1;
        for (int i = 0; i < more; i++) {
            uint32_t& word = target[positions[i]];
            word = (word & ~(255u << 23)) | uint32_t{*listed++} << 23;
        }
        if (rest < GROUP) std::memcpy(words + first, padded, rest * sizeof(uint32_t));
    }
    return listed == end ? 0 : -1;
}

}  // namespace
}  // namespace patrickstar
