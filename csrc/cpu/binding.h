// What the files that bind kernels to Python share. Each family's driver file (linear.cpp, ...) has its bind function.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace octavo {

void bind_linear(nanobind::module_& module);
void bind_quantized(nanobind::module_& module);
void bind_attention(nanobind::module_& module);
void bind_elementwise(nanobind::module_& module);
void bind_sampling(nanobind::module_& module);
void bind_program(nanobind::module_& module);

// A tensor's data_ptr() as a pointer.
template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Lets other Python threads run while a long kernel does. Taking the lock again can cost milliseconds beside a busy
// Python thread, so short kernels (under some 100 microseconds) keep it. `operations`: floating point operations or
// bytes moved, whichever takes longer. A kernel that runs as part of a Program finds the lock given up already.
class ReleaseGil {
   public:
    explicit ReleaseGil(int64_t operations) : state_(operations > 10'000'000 && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
    ~ReleaseGil() {
        if (state_) PyEval_RestoreThread(state_);
    }
    ReleaseGil(const ReleaseGil&) = delete;
    ReleaseGil& operator=(const ReleaseGil&) = delete;

   private:
    PyThreadState* state_;
};

}  // namespace octavo
