#include "neuron_kernels.h"

namespace thinfer {

#define THINFER_DECLARE(isa)                                                                                        \
  namespace isa {                                                                                                   \
  void neurons_gemv(const Matrix&, const NeuronInput&, const RowIds&, float*, uint8_t*);                            \
  void neurons_gemm(const Matrix&, const QuantizedRows&, const RowIds&, float*, int, uint8_t*);                     \
  void neurons_float(const Matrix&, const float*, int, int, const RowIds&, float*, int, uint8_t*);                  \
  void find_above(const float*, int, float, bool, uint16_t*);                                                       \
  }
THINFER_FOR_EACH_ISA(THINFER_DECLARE)
#undef THINFER_DECLARE

const NeuronKernels& neuron_kernels(Isa isa) {
#define THINFER_TABLE(isa) {isa::neurons_gemv, isa::neurons_gemm, isa::neurons_float, isa::find_above},
  static const NeuronKernels tables[] = {THINFER_FOR_EACH_ISA(THINFER_TABLE)};
#undef THINFER_TABLE
  return tables[static_cast<int>(isa)];
}

}  // namespace thinfer
