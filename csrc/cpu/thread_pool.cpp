#include "thread_pool.h"

#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>

namespace octavo {
namespace {

// How long a thread that has run out of work looks for more before it sleeps: longer than the pauses between the
// kernels of one step, much shorter than what another process would notice.
constexpr auto kSpin = std::chrono::microseconds(60);

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Look at `done` until it holds or the spin is over.
template <class Condition>
bool spin_until(Condition done) {
    auto look = [&] {
        for (int i = 0; i < 32; ++i) {
            if (done()) return true;
            relax();
        }
        return false;
    };
    if (look()) return true;
    auto end = std::chrono::steady_clock::now() + kSpin;
    while (std::chrono::steady_clock::now() < end)
        if (look()) return true;
    return done();
}

// A count that threads wait on: spinning for a while, then asleep.
class Signal {
   public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }

    void add(uint32_t count) {
        // Sequentially consistent, as in wait_past: either the sleeper sees the new value or it is seen sleeping.
        value_.fetch_add(count);
        if (num_sleeping_.load() > 0) value_.notify_all();
    }

    // Returns when the value is not `seen` any more.
    void wait_past(uint32_t seen) {
        if (spin_until([&] { return value() != seen; })) return;
        num_sleeping_.fetch_add(1);
        while (value_.load() == seen) value_.wait(seen);
        num_sleeping_.fetch_sub(1);
    }

   private:
    std::atomic<uint32_t> value_{0};
    std::atomic<int> num_sleeping_{0};
};

class Pool {
   public:
    explicit Pool(int count) : count_(count) {
        threads_.reserve(count - 1);
        try {
            for (int worker = 1; worker < count; ++worker) threads_.emplace_back([this, worker] { work(worker); });
        } catch (const std::system_error&) {
            // The system gives no more threads: those there are do all of the work.
        }
    }

    ~Pool() {
        stopping_.store(true);
        jobs_.add(1);
        for (auto& thread : threads_) thread.join();
    }

    int count() const { return count_; }

    void run(int64_t num_chunks, void (*fn)(void*, int64_t, int), void* context) {
        fn_ = fn;
        context_ = context;
        num_chunks_ = num_chunks;
        uint32_t before = done_.value();
        unclaimed_.store(num_chunks, std::memory_order_release);
        jobs_.add(1);
        auto others = uint32_t(num_chunks - claim(0));
        for (uint32_t seen; (seen = done_.value()) - before != others;) done_.wait_past(seen);
        if (std::exception_ptr error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
    }

   private:
    // Run chunks until none is left; how many it were. A claim takes one off `unclaimed_`, and only then are the fields
    // of the job read: they cannot change while a claim is open, as the caller waits for it. So a thread that comes
    // late finds nothing, or helps with whatever job is the current one.
    int64_t claim(int worker) {
        int64_t num_run = 0;
        while (unclaimed_.load(std::memory_order_relaxed) > 0) {
            int64_t left = unclaimed_.fetch_sub(1, std::memory_order_acquire);
            if (left <= 0) break;
            try {
                fn_(context_, num_chunks_ - left, worker);
            } catch (...) {  // no memory, for one; the others still work with what the caller owns, so it must wait
                std::lock_guard lock(error_mutex_);
                if (!error_) error_ = std::current_exception();
            }
            ++num_run;
        }
        return num_run;
    }

    void work(int worker) {
        uint32_t seen = 0;
        for (;;) {
            jobs_.wait_past(seen);
            seen = jobs_.value();
            if (stopping_.load()) return;
            if (int64_t num_run = claim(worker)) done_.add(uint32_t(num_run));
        }
    }

    const int count_;
    std::vector<std::thread> threads_;
    std::atomic<bool> stopping_{false};
    void (*fn_)(void*, int64_t, int) = nullptr;
    void* context_ = nullptr;
    int64_t num_chunks_ = 0;
    std::mutex error_mutex_;
    std::exception_ptr error_;  // the first that a chunk of the current job threw
    alignas(64) Signal jobs_;                       // jobs posted
    alignas(64) std::atomic<int64_t> unclaimed_{0};  // chunks of the current job; below 0 where several came too late
    alignas(64) Signal done_;                       // chunks that workers have run
};

// Never destroyed: at the exit of the process another thread may still be computing.
Pool* pool = nullptr;
std::mutex mutex;  // one job at a time, and none while the process forks
std::atomic<int> wanted_threads{1};

// A child has none of its parent's threads and makes its own when it needs them.
void keep_across_forks() {
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); },
                   [] {
                       pool = nullptr;
                       mutex.unlock();
                   });
}

Pool& current_pool(int count) {
    if (pool && pool->count() == count) return *pool;
    static std::once_flag once;
    std::call_once(once, keep_across_forks);
    delete pool;
    pool = nullptr;
    return *(pool = new Pool(count));
}

}  // namespace

void set_num_threads(int count) {
    if (count < 1 || count > 1024)
        throw std::invalid_argument("num_threads=" + std::to_string(count) + " must be 1 to 1024");
    std::lock_guard lock(mutex);
    wanted_threads = count;
}

int num_threads() { return wanted_threads; }

void parallel_for(int64_t num_chunks, void (*fn)(void*, int64_t, int), void* context) {
    if (num_chunks <= 1 || wanted_threads == 1) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) fn(context, chunk, 0);
        return;
    }
    std::lock_guard lock(mutex);
    current_pool(wanted_threads).run(num_chunks, fn, context);
}

}  // namespace octavo
