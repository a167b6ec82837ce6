// What each instruction set offers: the same operations, under a name of its own.

#pragma once

#include "ops.h"
#include "team.h"

namespace aiakq {

struct Table {
  const char* name;
  Body bodies[KINDS];
  int64_t (*linear_scratch)(const Linear&);
  int64_t (*dense_scratch)(const Dense&);
  int64_t (*attention_scratch)(const Attention&);
};

namespace ISA {

void linear(const void* op, Team& team);
void dense(const void* op, Team& team);
void embedding(const void* op, Team& team);
void norm(const void* op, Team& team);
void gate(const void* op, Team& team);
void sample(const void* op, Team& team);
void rotary(const void* op, Team& team);
void attention(const void* op, Team& team);
void feedback(const void* op, Team& team);
int64_t linear_scratch(const Linear& a);
int64_t dense_scratch(const Dense& a);
int64_t attention_scratch(const Attention& a);

}  // namespace ISA
}  // namespace aiakq
