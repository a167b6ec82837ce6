// Declarations of the kernels of ops.def, in the namespace of the instruction set being compiled.

#pragma once

#include "dispatch.h"

namespace aiakq {
namespace ISA {

#define OP(name, Name) void name(const Name& op, Worker& worker);
#define OP_WITH_SCRATCH(name, Name) \
  OP(name, Name)                    \
  int64_t scratch_bytes(const Name& op);
#include "ops.def"

}  // namespace ISA
}  // namespace aiakq
