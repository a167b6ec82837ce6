// The structs, enums and constants of ops.def.

#pragma once

#include <cstdint>

namespace aiakq {

struct LoraPart;
struct LoraSegments;
struct LoraWeights;
struct RankGroup;
struct RankStream;
struct SampleRow;
struct Step;
struct TokenPenalties;

#define ENUM(name) enum name : int32_t {
#define VALUE(name) name,
#define CONSTANT(name, value) constexpr int name = value;
#define OP(name, Name) \
  struct Name {        \
    int32_t kind;      \
    int32_t m;
#define STRUCT(Name) struct Name {
#define FIELD(type, name) type name;
#define END };
#include "ops.def"

// The kind of an operation is its index in ops.def.
enum Kind : int32_t {
#define OP(name, Name) KIND_##name,
#include "ops.def"
  KINDS
};

}  // namespace aiakq
