#include "elementwise/elementwise.h"

#include "binding.h"

namespace octavo {

void bind_elementwise(nanobind::module_&) {}

}  // namespace octavo
