#include "linear_kernels.h"

namespace thinfer {

#define THINFER_DECLARE(isa)                                                                                           \
  namespace isa {                                                                                                      \
  void quantize(const float*, int, float, const float*, const QuantizedRows&, int);                                    \
  void mask(const float*, int, float, const float*, float*);                                                           \
  int find_active(const QuantizedRows&, int, int, bool, const ActiveChannels&);                                        \
  void rows_gemv(const Matrix&, const QuantizedRows&, float*, int, int);                                               \
  void rows_gemm(const Matrix&, const QuantizedRows&, float*, int, int, int, uint8_t*);                                \
  size_t columns_gemv(const Matrix&, const QuantizedRows&, const ActiveChannels&, float*, int, int, int, int);         \
  void columns_gemm(const Matrix&, const QuantizedRows&, float*, int, int, int, uint8_t*);                             \
  size_t float_linear(const Matrix&, const float*, int, int, float*, int, int, int, bool, uint8_t*);                   \
  }
THINFER_FOR_EACH_ISA(THINFER_DECLARE)
#undef THINFER_DECLARE

const LinearKernels& linear_kernels(Isa isa) {
#define THINFER_TABLE(isa)                                                                                     \
  {isa::quantize,  isa::mask,         isa::find_active,  isa::rows_gemv,                                       \
   isa::rows_gemm, isa::columns_gemv, isa::columns_gemm, isa::float_linear},
  static const LinearKernels tables[] = {THINFER_FOR_EACH_ISA(THINFER_TABLE)};
#undef THINFER_TABLE
  return tables[static_cast<int>(isa)];
}

}  // namespace thinfer
