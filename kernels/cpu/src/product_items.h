// Products in items that threads may take in any order, so that one loop computes those of several layers
// (experts_kernel.cpp): first those that pack the rows, then those that multiply. Each computes what the operation does.

#pragma once

#include "ops.h"

namespace aiakq {
namespace ISA {

int64_t packing_items(const Linear& op);
void pack_item(const Linear& op, int64_t item);
int64_t product_items(const Linear& op);
void product_item(const Linear& op, int64_t item);

int64_t packing_items(const Dense& op);
void pack_item(const Dense& op, int64_t item);
int64_t product_items(const Dense& op);
void product_item(const Dense& op, int64_t item);

}  // namespace ISA
}  // namespace aiakq
