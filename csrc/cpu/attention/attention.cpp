#include "attention/attention.h"

#include "binding.h"

namespace octavo {

void bind_attention(nanobind::module_&) {}

}  // namespace octavo
