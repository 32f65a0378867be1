// Allocator in front of PyTorch's CPU allocator. It counts the bytes of live tensors, as the CUDA allocator does, and
// caches freed large blocks within a limit.
//
// Every block begins with a header that holds its size, so a free needs no lookup. Small blocks come from PyTorch's own
// allocator. Large blocks are mapped one by one, and freed ones are cached for reuse, because the system zeroes every
// page that it maps.
//
// A counter counts the tensors that were allocated after it was opened, and only those: of which age a block is stands
// in its header. The cache is trimmed before live and cached bytes would exceed the limit of a counter together.
//
// While a model is built that is larger than memory, large blocks are mappings of a file instead. Their pages can be
// dropped from memory at any time, since the next access reads them back.
//
// Beside it are two functions on storages that PyTorch offers to Python in builds for GPUs only: see storage_guard.py.

#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/alloc_cpu.h>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr size_t kHeaderBytes = 64;  // keeps the alignment of PyTorch's tensors
constexpr size_t kPageBytes = 4096;
constexpr size_t kMappedBytes = 128 << 10;  // blocks from this size on are mapped: glibc's initial threshold
constexpr size_t kWaste = 8;                // a cached block may be larger than needed by 1 / kWaste

struct Header {
  size_t nbytes;  // of the tensor
  size_t mapped;  // of the mapping, 0 if the block is not mapped
  int64_t age;    // counters that had been opened before the tensor was allocated
  bool in_file;
};
static_assert(sizeof(Header) <= kHeaderBytes);

// Bytes of the tensors from one age on.
struct Counter {
  int64_t age;
  int64_t live = 0;
  int64_t peak = 0;
  int64_t limit = -1;  // of live and cached bytes; negative without one
};

// Counters of tensors, and freed mapped blocks by size. The lock is held across fork(), so that a child finds it free.
class BlockCache {
 public:
  std::mutex mutex;

  Counter* open() {
    const std::lock_guard<std::mutex> guard(mutex);
    counters_.push_back(new Counter{++age_});
    return counters_.back();
  }

  void close(Counter* counter) {
    const std::lock_guard<std::mutex> guard(mutex);
    std::erase(counters_, counter);
    delete counter;
    trim(room());
  }

  // Count a new tensor; return its age.
  int64_t add(size_t nbytes) {
    const std::lock_guard<std::mutex> guard(mutex);
    for (Counter* counter : counters_) {
      counter->live += static_cast<int64_t>(nbytes);
      counter->peak = std::max(counter->peak, counter->live);
    }
    return age_;
  }

  void remove(size_t nbytes, int64_t age) {
    const std::lock_guard<std::mutex> guard(mutex);
    for (Counter* counter : counters_) {
      if (counter->age <= age) counter->live -= static_cast<int64_t>(nbytes);
    }
  }

  int64_t read(const int64_t& bytes) {
    const std::lock_guard<std::mutex> guard(mutex);
    return bytes;
  }

  void reset_peak(Counter* counter) {
    const std::lock_guard<std::mutex> guard(mutex);
    counter->peak = counter->live;
  }

  void set_limit(Counter* counter, int64_t limit) {
    const std::lock_guard<std::mutex> guard(mutex);
    counter->limit = limit;
    trim(room());
  }

  void* take(size_t& size) {
    const std::lock_guard<std::mutex> guard(mutex);
    const auto block = blocks_.lower_bound(size);
    if (block != blocks_.end() && block->first <= size + size / kWaste) {
      size = block->first;
      void* address = block->second;
      blocks_.erase(block);
      cached_ -= size;
      return address;
    }
    trim(room() - static_cast<int64_t>(size));
    return nullptr;
  }

  void give(void* address, size_t size) {
    const std::lock_guard<std::mutex> guard(mutex);
    blocks_.emplace(size, address);
    cached_ += size;
    trim(room());
  }

  int64_t cached() {
    const std::lock_guard<std::mutex> guard(mutex);
    return static_cast<int64_t>(cached_);
  }

 private:
  // Bytes that may be cached: what every limit leaves beside live tensors, and nothing without one.
  int64_t room() const {
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const Counter* counter : counters_) {
      if (counter->limit >= 0) least = std::min(least, counter->limit - counter->live);
    }
    return least == std::numeric_limits<int64_t>::max() ? 0 : least;
  }

  // Unmap the largest blocks until at most `limit` bytes are cached.
  void trim(int64_t limit) {
    while (!blocks_.empty() && static_cast<int64_t>(cached_) > limit) {
      const auto largest = std::prev(blocks_.end());
      munmap(largest->second, largest->first);
      cached_ -= largest->first;
      blocks_.erase(largest);
    }
  }

  std::multimap<size_t, void*> blocks_;
  size_t cached_ = 0;
  std::vector<Counter*> counters_;
  int64_t age_ = 0;
};

BlockCache& cache() {
  static BlockCache* const made = new BlockCache();  // never destroyed: tensors may be freed at the very end
  return *made;
}

// Blocks that are mappings of a file, one after the other in one range of addresses, so that the system counts few
// mappings.
class FileBlocks {
 public:
  std::mutex mutex;

  // Use a duplicate of the descriptor, which nobody else closes. Return false if another file is open.
  bool open(int fd, int64_t capacity) {
    const std::lock_guard<std::mutex> guard(mutex);
    if (fd_ != -1) return false;
    fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fd_ == -1) return false;
    void* range = mmap(nullptr, kRangeBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    range_ = range == MAP_FAILED ? nullptr : static_cast<char*>(range);
    end_ = 0;
    free_ = capacity;
    refused_ = 0;
    growing_ = true;
    return true;
  }

  // Map no further blocks.
  void stop() {
    const std::lock_guard<std::mutex> guard(mutex);
    growing_ = false;
  }

  // Close the file. Its blocks stay usable until they are freed; from now on a child process gets copies of them.
  void close() {
    const std::lock_guard<std::mutex> guard(mutex);
    leave();
  }

  // Close the file while the lock is held: also in a child process, whose writes and frees must not reach its parent.
  void leave() {
    growing_ = false;
    if (fd_ == -1) return;
    for (const auto& [address, block] : blocks_) {
      mmap(address, block.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd_, block.offset);
    }
    blocks_.clear();
    if (range_ != nullptr && static_cast<size_t>(end_) < kRangeBytes) {
      munmap(range_ + end_, kRangeBytes - static_cast<size_t>(end_));
    }
    ::close(fd_);
    fd_ = -1;
    range_ = nullptr;
  }

  // Return nullptr if no file is open, or the file's capacity or the disk has no space for the block.
  void* take(size_t size) {
    if (!growing_.load(std::memory_order_relaxed)) return nullptr;
    const std::lock_guard<std::mutex> guard(mutex);
    if (!growing_) return nullptr;
    void* block = free_ < static_cast<int64_t>(size) ? nullptr : map(size);
    if (block == nullptr) {
      refused_ += static_cast<int64_t>(size);
      return nullptr;
    }
    blocks_[block] = {size, end_};
    end_ += static_cast<off_t>(size);
    free_ -= static_cast<int64_t>(size);
    return block;
  }

  int64_t refused() {
    const std::lock_guard<std::mutex> guard(mutex);
    return refused_;
  }

  void give(void* block, size_t size) {
    const std::lock_guard<std::mutex> guard(mutex);
    munmap(block, size);
    const auto known = blocks_.find(block);
    if (known != blocks_.end()) {
      // Where holes can't be punched, the space is freed with the file.
      (void)fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, known->second.offset, known->second.size);
      free_ += static_cast<int64_t>(known->second.size);
      blocks_.erase(known);
    }
  }

  // Drop the pages of all blocks from this process's memory.
  void drop() {
    const std::lock_guard<std::mutex> guard(mutex);
    for (const auto& [address, block] : blocks_) madvise(address, block.size, MADV_DONTNEED);
  }

 private:
  static constexpr size_t kRangeBytes = size_t{1} << 42;

  struct Block {
    size_t size;
    off_t offset;
  };

  void* map(size_t size) {
    // Without reserved space, a full disk would end the process when a page is written back. The call of the C library
    // would write each block where the file system can't reserve.
    if (fallocate(fd_, 0, end_, static_cast<off_t>(size)) != 0) {
      (void)!ftruncate(fd_, end_);  // frees what was reserved before the failure
      return nullptr;
    }
    const bool in_range = range_ != nullptr && static_cast<size_t>(end_) + size <= kRangeBytes;
    void* block = mmap(
        in_range ? range_ + end_ : nullptr,
        size,
        PROT_READ | PROT_WRITE,
        MAP_SHARED | (in_range ? MAP_FIXED : 0),
        fd_,
        end_);
    return block == MAP_FAILED ? nullptr : block;
  }

  std::map<void*, Block> blocks_;
  char* range_ = nullptr;  // reserved addresses; block i is at the offset that it has in the file
  int64_t free_ = 0;       // bytes that the file may still grow by
  int64_t refused_ = 0;    // bytes of the blocks that it had no space for
  int fd_ = -1;
  off_t end_ = 0;
  std::atomic<bool> growing_{false};
};

FileBlocks& file_blocks() {
  static FileBlocks* const made = new FileBlocks();
  return *made;
}

void* allocate_block(size_t nbytes) {
  size_t mapped = 0;
  bool in_file = false;
  void* block = nullptr;
  if (nbytes >= kMappedBytes && nbytes <= std::numeric_limits<size_t>::max() / 2) {
    mapped = (nbytes + kHeaderBytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    block = file_blocks().take(mapped);
    in_file = block != nullptr;
    if (block == nullptr) block = cache().take(mapped);
    if (block == nullptr) {
      block = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (block == MAP_FAILED) block = nullptr;
    }
  }
  if (block == nullptr) {
    mapped = 0;
    TORCH_CHECK(
        nbytes <= std::numeric_limits<size_t>::max() / 2,
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate ",
        nbytes,
        " bytes.");
    block = c10::alloc_cpu(nbytes + kHeaderBytes);  // raises PyTorch's error if memory is exhausted
  }
  *static_cast<Header*>(block) = Header{nbytes, mapped, cache().add(nbytes), in_file};
  void* data = static_cast<char*>(block) + kHeaderBytes;
  c10::profiledCPUMemoryReporter().New(data, nbytes);
  return data;
}

void free_block(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  void* block = static_cast<char*>(data) - kHeaderBytes;
  const Header header = *static_cast<Header*>(block);
  cache().remove(header.nbytes, header.age);
  if (header.in_file) {
    file_blocks().give(block, header.mapped);
  } else if (header.mapped != 0) {
    cache().give(block, header.mapped);
  } else {
    c10::free_cpu(block);
  }
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = nbytes == 0 ? nullptr : allocate_block(nbytes);
    return {data, data, &free_block, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }

  void copy_data(void* target, const void* source, size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }
};

CountingAllocator* installed = nullptr;

// Older versions of PyTorch can't take a refusal back.
template <typename Storage>
constexpr bool can_allow = requires(Storage& storage) { storage.clear_data_ptr_access_error_msg_(); };

template <typename Storage>
void allow_access(Storage& storage) {
  if constexpr (can_allow<Storage>) {
    storage.clear_data_ptr_access_error_msg_();
  }
}

}  // namespace

extern "C" {

// Return 1 if the two functions below work.
int patrickstar_can_refuse() {
  return can_allow<c10::StorageImpl> ? 1 : 0;
}

// Let every access to the memory of a storage raise this error.
void patrickstar_refuse_access(c10::StorageImpl* storage, const char* message) {
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
}

void patrickstar_allow_access(c10::StorageImpl* storage) {
  allow_access(*storage);
}

// Put the allocator in front. Return 1 if tensors are counted from now on, 0 if another allocator has precedence.
int patrickstar_install() {
  if (installed == nullptr) {
    installed = new CountingAllocator();
    c10::SetCPUAllocator(installed, 1);
    pthread_atfork(
        [] { file_blocks().mutex.lock(), cache().mutex.lock(); },
        [] { cache().mutex.unlock(), file_blocks().mutex.unlock(); },
        [] {
          cache().mutex.unlock();
          file_blocks().leave();
          file_blocks().mutex.unlock();
        });
  }
  return c10::GetCPUAllocator() == installed ? 1 : 0;
}

// Count the tensors that are allocated from now on, until the counter is closed.
Counter* patrickstar_open_counter() {
  return cache().open();
}

void patrickstar_close_counter(Counter* counter) {
  cache().close(counter);
}

int64_t patrickstar_live_bytes(Counter* counter) {
  return cache().read(counter->live);
}

int64_t patrickstar_peak_bytes(Counter* counter) {
  return cache().read(counter->peak);
}

void patrickstar_reset_peak(Counter* counter) {
  cache().reset_peak(counter);
}

// Keep live and cached bytes within a limit, as far as freeing the cache can; a negative one is none.
void patrickstar_set_limit(Counter* counter, int64_t limit) {
  cache().set_limit(counter, limit);
}

int64_t patrickstar_cached_bytes() {
  return cache().cached();
}

// Map new large blocks from this empty file, up to its capacity. Return 0 if another file is in use.
int patrickstar_open_file(int fd, int64_t capacity) {
  return file_blocks().open(fd, capacity) ? 1 : 0;
}

int64_t patrickstar_refused_bytes() {
  return file_blocks().refused();
}

void patrickstar_stop_file() {
  file_blocks().stop();
}

void patrickstar_drop_file_pages() {
  file_blocks().drop();
}

void patrickstar_close_file() {
  file_blocks().close();
}

}  // extern "C"
