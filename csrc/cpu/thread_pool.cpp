#include "thread_pool.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>

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
    auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (done()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return done();
}

class Pool {
   public:
    explicit Pool(int count) : owner_(getpid()), count_(count) {
        for (int worker = 1; worker < count; ++worker) threads_.emplace_back([this, worker] { work(worker); });
    }

    ~Pool() {
        stopping_ = true;
        epoch_.fetch_add(1);
        epoch_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    int count() const { return count_; }
    bool is_forked() const { return owner_ != getpid(); }
    // After a fork the threads are not there to be joined.
    void abandon() {
        for (auto& thread : threads_) thread.detach();
        threads_.clear();
    }

    void run(int64_t num_chunks, void (*fn)(void*, int64_t, int), void* context) {
        fn_.store(fn, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        num_chunks_.store(uint32_t(num_chunks), std::memory_order_relaxed);
        num_done_.store(0, std::memory_order_relaxed);
        uint32_t generation = uint32_t(ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        ticket_.store(uint64_t(generation) << 32);
        epoch_.fetch_add(1);
        if (num_sleeping_.load() > 0) epoch_.notify_all();
        claim(0);
        auto all_done = [&] { return num_done_.load(std::memory_order_acquire) == uint32_t(num_chunks); };
        while (!spin_until(all_done)) std::this_thread::yield();
    }

   private:
    // Run chunks until none is left. A ticket is (generation, next chunk): a claim by compare-and-swap succeeds only
    // while the job whose fields were read is still the current one, and the job cannot end while a claim is open.
    void claim(int worker) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        for (;;) {
            auto fn = fn_.load(std::memory_order_relaxed);
            auto context = context_.load(std::memory_order_relaxed);
            uint32_t num_chunks = num_chunks_.load(std::memory_order_relaxed);
            uint32_t chunk = uint32_t(ticket);
            if (chunk >= num_chunks) {
                // fields of a newer job may have been read with an older ticket: look again before giving up
                uint64_t now = ticket_.load(std::memory_order_acquire);
                if (now == ticket) return;
                ticket = now;
                continue;
            }
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel,
                                               std::memory_order_acquire))
                continue;
            fn(context, chunk, worker);
            num_done_.fetch_add(1, std::memory_order_release);
            ticket = ticket_.load(std::memory_order_acquire);
        }
    }

    void work(int worker) {
        uint32_t seen = 0;
        while (!stopping_) {
            if (!spin_until([&] { return epoch_.load(std::memory_order_acquire) != seen; })) {
                num_sleeping_.fetch_add(1);
                epoch_.wait(seen);
                num_sleeping_.fetch_sub(1);
            }
            seen = epoch_.load(std::memory_order_acquire);
            if (!stopping_) claim(worker);
        }
    }

    const pid_t owner_;
    const int count_;
    std::vector<std::thread> threads_;
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<int> num_sleeping_{0};
    alignas(64) std::atomic<uint64_t> ticket_{uint64_t(1) << 32};
    std::atomic<void (*)(void*, int64_t, int)> fn_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<uint32_t> num_chunks_{0};
    alignas(64) std::atomic<uint32_t> num_done_{0};
};

std::mutex mutex;  // one job at a time, whoever calls
std::unique_ptr<Pool> pool;
int wanted_threads = 1;

Pool& current_pool() {
    if (pool && pool->is_forked()) {
        pool->abandon();
        pool.release();  // its threads' state is unknown
    }
    if (!pool || pool->count() != wanted_threads) {
        pool.reset();
        pool = std::make_unique<Pool>(wanted_threads);
    }
    return *pool;
}

}  // namespace

void set_num_threads(int count) {
    std::lock_guard lock(mutex);
    wanted_threads = count;
}

int num_threads() { return wanted_threads; }

void parallel_for(int64_t num_chunks, void (*fn)(void*, int64_t, int), void* context) {
    if (num_chunks <= 0) return;
    if (num_chunks == 1 || wanted_threads == 1) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) fn(context, chunk, 0);
        return;
    }
    std::lock_guard lock(mutex);
    current_pool().run(num_chunks, fn, context);
}

}  // namespace octavo
