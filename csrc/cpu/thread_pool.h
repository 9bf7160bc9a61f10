// The one pool of threads of the hot path. The caller works too; threads claim chunks, and the caller waits only for
// chunks that were claimed, so a thread that the system does not run holds nobody up.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace octavo {

// Threads that compute, the caller among them: 1 to 1024, else std::invalid_argument. Waits for a running job.
void set_num_threads(int count);
int num_threads();

// fn(context, chunk, worker) for every chunk in [0, num_chunks), in any order and from any thread of the pool; all of
// it has happened before this returns. worker: 0 (the caller) .. num_threads() - 1, where num_threads() is that of the
// moment the job starts. One job at a time: other callers wait. Not to be nested.
// What fn throws is thrown here, the first of several, once no thread is in it any more; chunks may then be left out.
void parallel_for(int64_t num_chunks, void (*fn)(void* context, int64_t chunk, int worker), void* context);

template <class Function>
void parallel_for(int64_t num_chunks, Function&& function) {
    auto call = [](void* context, int64_t chunk, int worker) {
        (*static_cast<std::remove_reference_t<Function>*>(context))(chunk, worker);
    };
    parallel_for(num_chunks, call, const_cast<void*>(static_cast<const void*>(std::addressof(function))));
}

}  // namespace octavo
