#include "sampling/sampling.h"

#include "binding.h"

namespace octavo {

void bind_sampling(nanobind::module_&) {}

}  // namespace octavo
