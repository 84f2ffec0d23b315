// Drives the native code without Python, for sanitizers.
#include "check.h"

int main() {
  test_memory();
  test_half();
  test_threads();
  test_batch_check();
  test_program();
  test_linear();
  test_neurons();
  std::puts("native tests passed");
  return 0;
}
