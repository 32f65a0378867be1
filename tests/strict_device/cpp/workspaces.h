// Workspaces of products of matrices. See [Note: workspaces of a strict device].
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>

namespace strict {

// Allocate the workspaces of an operator on this stream, if it is a product of matrices and the calling thread has none.
void use_workspaces(const c10::OperatorHandle& op, const torch::jit::Stack& arguments, int device, int64_t stream);

// Free all workspaces.
void free_workspaces();

}  // namespace strict
