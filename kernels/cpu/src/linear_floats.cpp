// Products of quantized weights (linear_product.h): codes that are 8-bit floats.

#include "linear_product.h"

namespace aiakq {
namespace ISA {

Product float_product(const Linear& op) {
  if (op.math == E4M3) return {pack<Panels>, multiply<Panels, E4M3, 8, 1>};
  return {pack<Panels>, multiply<Panels, E5M2, 8, 1>};
}

}  // namespace ISA
}  // namespace aiakq
