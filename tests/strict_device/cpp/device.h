// What the operators need of the strict device.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include "runtime.h"

namespace strict {

c10::Stream current_stream(c10::DeviceIndex index);
const at::Generator& generator(c10::DeviceIndex index);
c10::Allocator* device_allocator();

// Queue a copy within the current device on its current stream.
void queue_copy(void* target, const void* source, size_t nbytes);

// Register the allocators and hooks; once per process.
void register_device();

}  // namespace strict
