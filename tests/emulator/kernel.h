// What the C++ text of a kernel begins with. Read once and kept by g++, as reading it takes longer than most kernels.
#include <functional>
#include "cuda.h"
namespace machine {
const char* launch(uint3, unsigned, unsigned, unsigned, size_t, unsigned, std::function<void()>);
}
