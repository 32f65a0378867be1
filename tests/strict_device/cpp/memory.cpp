// Memory of the strict device: a caching allocator with segments, as PyTorch has for CUDA devices.
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "queues.h"

namespace strict {
namespace {

constexpr size_t kAlign = 512, kPage = 4096;

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

struct Block {
  char* address = nullptr;
  size_t nbytes = 0;
  int64_t stream = 0;
  bool free = true;
  bool mapped = true;           // false: only addresses, of an expandable segment
  std::vector<MarkerPtr> uses;  // of other streams, after which it may be reused
  std::vector<int64_t> users;
};

struct Segment {
  char* address = nullptr;
  size_t nbytes = 0;
  int64_t stream = 0;
  size_t page = 0;  // of an expandable segment; 0: it has memory as a whole
  std::map<char*, Block> blocks;
};

using Blocks = std::map<char*, Block>;

struct Memory {
  size_t end = 0;
  std::map<char*, Segment> segments;
  std::vector<std::pair<char*, size_t>> unused_ranges;
  MemoryStats stats;
};

Memory memories[kDevices];

Memory& memory_of(Device& device) { return memories[&device - devices]; }

int owner(const void* address) {
  auto* byte = static_cast<const char*>(address);
  for (int index = 0; index < kDevices; ++index) {
    char* begin = devices[index].guarded;
    if (begin != nullptr && begin <= byte && byte < begin + kSpace) return index;
  }
  return -1;
}

void fill_poison(Queue& queue, char* address, size_t nbytes) {
  push(queue, {[=] { std::memset(address, 0xFF, nbytes); }});
}

Block* find_block(Memory& memory, char* address, Segment** segment = nullptr) {
  auto after = memory.segments.upper_bound(address);
  if (after == memory.segments.begin()) return nullptr;
  Segment& found = std::prev(after)->second;
  if (segment != nullptr) *segment = &found;
  auto block = found.blocks.find(address);
  return block == found.blocks.end() ? nullptr : &block->second;
}

bool reusable(const Block& block) {
  return std::all_of(block.uses.begin(), block.uses.end(), [](const MarkerPtr& use) { return use->passed; });
}

bool available(const Block& block) { return block.free && reusable(block); }

void grow(Memory& memory, size_t nbytes) {
  memory.stats.reserved += nbytes;
  memory.stats.reserved_peak = std::max(memory.stats.reserved_peak, memory.stats.reserved);
}

// Pages of expandable segments: 2 and 20 times the largest block of the small pool.
size_t page_of(size_t nbytes) { return nbytes <= settings.small_bytes ? 2 * settings.small_bytes : 20 * settings.small_bytes; }

// What PyTorch compares with its limit for a block that is not cached.
size_t asked_bytes(size_t nbytes) {
  const size_t small = settings.small_bytes;
  if (!small) return std::max(nbytes, settings.segment_bytes);
  return nbytes < 10 * small ? page_of(nbytes) : round_up(nbytes, 2 * small);
}

// Divide a block behind `nbytes`.
void split(Blocks& blocks, Block& block, size_t nbytes) {
  if (block.nbytes == nbytes) return;
  Block rest = block;
  rest.address += nbytes, rest.nbytes -= nbytes;
  block.nbytes = nbytes;
  blocks[rest.address] = rest;
}

// Merge a free block with free neighbours that have memory if it has.
Blocks::iterator merge(Blocks& blocks, Blocks::iterator it) {
  auto join = [&](auto into, auto from) {
    into->second.nbytes += from->second.nbytes;
    into->second.uses.insert(into->second.uses.end(), from->second.uses.begin(), from->second.uses.end());
    blocks.erase(from);
    return into;
  };
  auto alike = [&](auto other) { return other->second.free && other->second.mapped == it->second.mapped; };
  auto next = std::next(it);
  if (next != blocks.end() && alike(next)) it = join(it, next);
  if (it != blocks.begin() && alike(std::prev(it))) it = join(std::prev(it), it);
  return it;
}

// Size that a block can grow to, by pages behind it.
size_t expandable_bytes(const Blocks& blocks, Blocks::const_iterator it) {
  auto next = std::next(it);
  return it->second.nbytes + (next != blocks.end() && !next->second.mapped ? next->second.nbytes : 0);
}

Block* take_cached(Memory& memory, int64_t stream, size_t nbytes) {
  Block* best = nullptr;
  Segment* home = nullptr;
  size_t best_bytes = 0;
  const size_t page = settings.small_bytes ? page_of(nbytes) : 0;
  for (auto& [_, segment] : memory.segments) {
    if (segment.stream != stream || segment.page != page) continue;
    for (auto it = segment.blocks.begin(); it != segment.blocks.end(); ++it) {
      Block& block = it->second;
      bool fits = settings.segment_bytes || page ? block.nbytes >= nbytes : block.nbytes == nbytes;
      if (!block.mapped || !fits || !available(block)) continue;
      size_t bytes = page ? expandable_bytes(segment.blocks, it) : block.nbytes;
      if (best == nullptr || bytes < best_bytes) best = &block, home = &segment, best_bytes = bytes;
    }
  }
  if (best != nullptr) split(home->blocks, *best, nbytes);
  return best;
}

// A range of addresses, all of which are one free block.
Segment& new_range(Device& device, int64_t stream, size_t nbytes, size_t page) {
  Memory& memory = memory_of(device);
  size_t space = round_up(nbytes, kPage);
  Segment segment;
  segment.nbytes = nbytes, segment.stream = stream, segment.page = page;
  auto unused = std::find_if(memory.unused_ranges.begin(), memory.unused_ranges.end(),
                             [&](auto& range) { return range.second == space; });
  if (unused != memory.unused_ranges.end()) {
    segment.address = unused->first;
    memory.unused_ranges.erase(unused);
  } else {
    if (memory.end + space > kSpace) throw OutOfMemory("the address space of the strict device is used up");
    segment.address = device.guarded + memory.end;
    memory.end += space;
  }
  Block whole;
  whole.address = segment.address, whole.nbytes = nbytes, whole.stream = stream, whole.mapped = page == 0;
  segment.blocks[whole.address] = whole;
  return memory.segments[segment.address] = segment;
}

// Give memory to the begin of a block without any, at least `nbytes`. Return the block, merged; end() without memory.
Blocks::iterator map_pages(Device& device, Segment& segment, Blocks::iterator it, size_t nbytes) {
  Memory& memory = memory_of(device);
  Block& block = it->second;
  nbytes = std::min(block.nbytes, round_up(nbytes, segment.page));
  if (memory.stats.reserved + nbytes > settings.capacity) return segment.blocks.end();
  split(segment.blocks, block, nbytes);
  block.mapped = true;
  grow(memory, nbytes);
  fill_poison(*device.queues[segment.stream], kernel_address(block.address), nbytes);
  return merge(segment.blocks, it);
}

// Return the first block from which `nbytes` can be had, with memory or without; end() if there is none.
Blocks::iterator room_for(Segment& segment, size_t nbytes) {
  Blocks& blocks = segment.blocks;
  for (auto it = blocks.begin(); it != blocks.end(); ++it) {
    if (it->second.mapped) continue;
    auto first = it != blocks.begin() && available(std::prev(it)->second) ? std::prev(it) : it;
    size_t found = 0;
    for (auto each = first; each != blocks.end() && available(each->second) && found < nbytes; ++each) {
      found += each->second.nbytes;
    }
    if (found >= nbytes) return first;
  }
  return blocks.end();
}

Block* expand(Device& device, int64_t stream, size_t nbytes) {
  Memory& memory = memory_of(device);
  const size_t page = page_of(nbytes);
  Segment* segment = nullptr;
  Blocks::iterator it;
  for (auto& [_, each] : memory.segments) {
    if (each.stream != stream || each.page != page) continue;
    it = room_for(each, nbytes);
    if (it != each.blocks.end()) {
      segment = &each;
      break;
    }
  }
  if (segment == nullptr) {
    segment = &new_range(device, stream, round_up(settings.capacity / 8 * 9, page), page);
    it = segment->blocks.begin();
  }
  if (!it->second.mapped) it = map_pages(device, *segment, it, nbytes);
  while (it != segment->blocks.end() && it->second.nbytes < nbytes) {
    it = map_pages(device, *segment, std::next(it), nbytes - it->second.nbytes);
  }
  if (it == segment->blocks.end()) return nullptr;
  split(segment->blocks, it->second, nbytes);
  return &it->second;
}

Block* new_block(Device& device, int64_t stream, size_t nbytes) {
  Memory& memory = memory_of(device);
  size_t size = asked_bytes(nbytes);
  if (memory.stats.reserved + size > memory.stats.limit) return nullptr;
  if (settings.small_bytes) return expand(device, stream, nbytes);
  if (memory.stats.reserved + size > settings.capacity) return nullptr;
  Segment& segment = new_range(device, stream, size, 0);
  grow(memory, size);
  fill_poison(*device.queues[stream], kernel_address(segment.address), size);
  return take_cached(memory, stream, nbytes);
}

void discard(Device& device, char* address, size_t nbytes) {
  fallocate(device.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, address - device.guarded, nbytes);
}

// Give back the whole pages of free blocks; all work must have run.
void unmap_pages(Device& device, Segment& segment) {
  Memory& memory = memory_of(device);
  std::vector<char*> free;
  for (auto& [address, block] : segment.blocks) {
    if (block.mapped && available(block)) free.push_back(address);
  }
  for (char* address : free) {
    auto it = segment.blocks.find(address);
    size_t offset = address - segment.address;
    size_t begin = round_up(offset, segment.page), end = (offset + it->second.nbytes) / segment.page * segment.page;
    if (begin >= end) continue;
    if (begin > offset) {
      split(segment.blocks, it->second, begin - offset);
      it = std::next(it);
    }
    split(segment.blocks, it->second, end - begin);
    it->second.mapped = false;
    it->second.uses.clear();
    discard(device, it->first, end - begin);
    memory.stats.reserved -= end - begin;
    merge(segment.blocks, it);
  }
}

}  // namespace

void release_segments(Device& device) {
  Memory& memory = memory_of(device);
  for (auto it = memory.segments.begin(); it != memory.segments.end();) {
    Segment& segment = it->second;
    if (segment.page) unmap_pages(device, segment);
    bool unused = std::all_of(segment.blocks.begin(), segment.blocks.end(), [&](auto& each) {
      return available(each.second) && (!segment.page || !each.second.mapped);
    });
    if (!unused) {
      ++it;
      continue;
    }
    size_t space = round_up(segment.nbytes, kPage);
    if (!segment.page) {
      discard(device, segment.address, space);
      memory.stats.reserved -= segment.nbytes;
    }
    memory.unused_ranges.emplace_back(segment.address, space);
    it = memory.segments.erase(it);
  }
}

void* allocate(int index, int64_t stream, size_t nbytes) {
  std::lock_guard lock(mutex);
  progress();
  raise_failure();
  Device& found = device(index);
  Memory& memory = memory_of(found);
  nbytes = round_up(std::max(nbytes, size_t{1}), kAlign);
  Block* block = take_cached(memory, stream, nbytes);
  if (block == nullptr) block = new_block(found, stream, nbytes);
  if (block == nullptr) {
    if (settings.segment_bytes || settings.small_bytes) ++memory.stats.retries;
    run_everything(found);
    release_segments(found);
    block = new_block(found, stream, nbytes);
  }
  if (block == nullptr) {
    throw OutOfMemory("strict device out of memory. Tried to allocate " + std::to_string(nbytes) + " bytes; " +
                      std::to_string(memory.stats.allocated) + " of " +
                      std::to_string(std::min(settings.capacity, memory.stats.limit)) + " bytes are allocated and " +
                      std::to_string(memory.stats.reserved) + " reserved");
  }
  block->free = false;
  block->uses.clear();
  memory.stats.allocated += block->nbytes;
  memory.stats.allocated_peak = std::max(memory.stats.allocated_peak, memory.stats.allocated);
  return block->address;
}

void deallocate(void* address) {
  if (address == nullptr) return;
  std::lock_guard lock(mutex);
  Device& found = devices[owner(address)];
  Memory& memory = memory_of(found);
  Segment* segment = nullptr;
  Block* block = find_block(memory, static_cast<char*>(address), &segment);
  if (block == nullptr || block->free) std::abort();
  block->free = true;
  memory.stats.allocated -= block->nbytes;
  Queue& owner_queue = *found.queues[block->stream];
  for (int64_t user : block->users) {
    block->uses.push_back(record(owner_queue.device, user));
    push(owner_queue, {nullptr, block->uses.back()});
  }
  block->users.clear();
  fill_poison(owner_queue, kernel_address(block->address), block->nbytes);
  if (settings.segment_bytes || segment->page) merge(segment->blocks, segment->blocks.find(block->address));
}

void record_use(void* address, int64_t stream) {
  std::lock_guard lock(mutex);
  Block* block = find_block(memory_of(devices[owner(address)]), static_cast<char*>(address));
  if (block != nullptr && block->stream != stream) block->users.push_back(stream);
}

bool is_device_address(const void* address) { return owner(address) >= 0; }

char* kernel_address(const void* address) {
  int index = owner(address);
  auto* byte = static_cast<const char*>(address);
  return index < 0 ? const_cast<char*>(byte) : devices[index].kernel + (byte - devices[index].guarded);
}

void empty_cache() {
  std::lock_guard lock(mutex);
  for (Device& each : devices) {
    if (each.guarded == nullptr) continue;
    run_everything(each);
    release_segments(each);
  }
}

MemoryStats memory_stats(int index) {
  std::lock_guard lock(mutex);
  Memory& memory = memory_of(device(index));
  MemoryStats stats = memory.stats;
  for (auto& [_, segment] : memory.segments) {
    if (segment.page) continue;  // PyTorch counts no free parts of expandable segments
    size_t used = 0;
    for (auto& [_, block] : segment.blocks) used += block.free ? 0 : block.nbytes;
    if (used) stats.inactive_split += segment.nbytes - used;
  }
  return stats;
}

void reset_peak(int index) {
  std::lock_guard lock(mutex);
  MemoryStats& stats = memory_of(device(index)).stats;
  stats.allocated_peak = stats.allocated, stats.reserved_peak = stats.reserved;
}

void set_limit(int index, size_t nbytes) {
  std::lock_guard lock(mutex);
  memory_of(device(index)).stats.limit = nbytes;
}

size_t capacity() { return settings.capacity; }

}  // namespace strict
