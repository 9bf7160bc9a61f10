#include "linear/linear.h"

#include "binding.h"

namespace octavo {

void bind_linear(nanobind::module_&) {}

}  // namespace octavo
