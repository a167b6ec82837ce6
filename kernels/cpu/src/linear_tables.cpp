// Products of quantized weights (linear_product.h): codes that are indices of a table.

#include "linear_product.h"

namespace aiakq {
namespace ISA {

Product table_product(const Linear& op) {
  switch (op.math) {
    case TABLE: return product_of<TABLE, 4>(op.group);
    case TABLE_OF_5_BITS: return product_of<TABLE_OF_5_BITS, 4>(op.group);
    case TABLE_OF_8_BITS: return product_of<TABLE_OF_8_BITS, 4>(op.group);
    default: return product_of<TABLE_OF_16_BITS, 4>(op.group);
  }
}

}  // namespace ISA
}  // namespace aiakq
