// Data passed from Python: addresses and numbers, no PyTorch objects. `_kernels/cpp_backend.py` mirrors these structs.
#pragma once

#include <cstdint>

namespace patrickstar {

enum Dtype : int32_t { FLOAT32, BFLOAT16, FLOAT16 };
enum Rule : int32_t { ADAM, SGD, LION, SCHEDULE_FREE, ADAM_8BIT };
enum List { MASTER, STATE0, STATE1, AVERAGE, LISTS };  // AVERAGE: moving average of the master

constexpr int SCALARS = 9;
constexpr int64_t CACHE_LINE_BYTES = 64;

// Consecutive elements of one parameter in the parallel chunk lists. `param` may be the same memory as `grad`.
struct Span {
    void* param;
    const void* upper;  // the parameter before the update, if masters are split, else null; may be `param`
    const void* grad;
    const float* accumulated;  // sum of the gradients before `grad`, or null
    float* lists[LISTS];       // null where the rule has no such list; the states of ADAM_8BIT are bytes, and masters
                               // are their lower halves, of 16 bits, if they are split
    float* out[LISTS];         // receive the new values, while `lists` are only read; null: in place
    const double* scales;  // factors of the gradient, applied in order, each rounded to float by C++; set by the call
    int64_t scale_count;
    int64_t numel;
    int32_t param_dtype;
    int32_t grad_dtype;
    int32_t rule;
    int32_t mode;
    double scalars[SCALARS];  // rounded to float by C++, where denormals are not flushed
    double average_weight;
};

// Sums in fixed order: the elements of a BLOCK are rows of LANES; see `_kernels/grad_norm.py`.
constexpr int LANES = 32;
constexpr int ROWS = 128;
constexpr int64_t BLOCK = int64_t{LANES} * ROWS;

// Unit of work of a thread, in elements: a multiple of BLOCK whose lists, with new values in other memory 26 bytes per
// element, fit a second-level cache of 512 KiB. A call is divided down to it, since a thread that has nothing to do
// costs more than a piece.
constexpr int64_t PIECE = int64_t{1} << 14;

// The loops of one instruction set. All variants give the same bits.
struct Loops {
    const char* name;
    bool (*runs_here)();
    void (*update)(const Span& span, int64_t first, int64_t count);
    // Stores one sum of squares per BLOCK and returns the number of non-finite elements.
    int64_t (*grad_stats)(const Span& span, int64_t first, int64_t count, double* sums);
    // Adds the sums of a span's BLOCKs as rows of LANES.
    double (*fold)(const double* values, int64_t count);
    uint64_t (*read)(const uint64_t* words, int64_t count);
    int64_t (*pack)(const uint32_t* words, int64_t numel, uint8_t* out, int64_t capacity);
    int64_t (*unpack)(const uint8_t* packed, int64_t length, uint32_t* words, int64_t numel);
};

}  // namespace patrickstar
