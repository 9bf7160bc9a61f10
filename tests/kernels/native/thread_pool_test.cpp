// A program that drives the thread pool as hard as it can, for ThreadSanitizer and for timing:
//     thread_pool_test SECONDS     checks, in about that time; prints what was wrong and exits with 1
//     thread_pool_test time        cost of an empty job of 2 chunks with 2 threads, microseconds
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "thread_pool.h"

using octavo::num_threads;
using octavo::parallel_for;
using octavo::set_num_threads;
using Clock = std::chrono::steady_clock;

namespace {

void fail(const char* what) {
    std::fprintf(stderr, "thread pool: %s\n", what);
    std::exit(1);
}

void spin(int count) {
    for (int i = 0; i < count; ++i) asm volatile("" ::: "memory");
}

// Every chunk is run once, by a worker of the pool, one chunk a worker at a time, and all of it is seen afterwards.
// Nothing here is atomic but the marks of running workers, so that ThreadSanitizer sees each missing order.
void check_job(int64_t num_chunks, int work) {
    std::vector<int> visits(num_chunks, 0);
    std::vector<std::atomic<bool>> running(num_threads());
    parallel_for(num_chunks, [&](int64_t chunk, int worker) {
        if (chunk < 0 || chunk >= num_chunks) fail("a chunk out of range");
        if (worker < 0 || worker >= int(running.size())) fail("a worker out of range");
        if (running[worker].exchange(true)) fail("one worker runs two chunks at once");
        spin(work);
        ++visits[chunk];
        running[worker] = false;
    });
    for (int count : visits)
        if (count != 1) fail("a chunk was not run exactly once");
}

// Jobs that follow each other at once, some much larger than the one before: workers come late to most of them.
void many_tiny_jobs(Clock::time_point end) {
    set_num_threads(4);
    for (unsigned job = 0; Clock::now() < end; ++job) check_job(job % 7 == 0 ? 200 : 1 + job % 5, job % 3 * 20);
}

// Workers have gone to sleep before the next job comes, at the very moment, or not.
void pauses_between_jobs(Clock::time_point end) {
    set_num_threads(3);
    for (unsigned job = 0; Clock::now() < end; ++job) {
        check_job(6, 100);
        std::this_thread::sleep_for(std::chrono::microseconds(job * 7 % 90));
    }
}

void changing_thread_counts(Clock::time_point end) {
    for (int round = 0; Clock::now() < end; ++round) {
        set_num_threads(1 + round % 9);
        for (int job = 0; job < 5; ++job) check_job(1 + round % 40, 10);
    }
}

void many_callers(Clock::time_point end) {
    set_num_threads(2);
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i)
        callers.emplace_back([end] {
            while (Clock::now() < end) check_job(8, 30);
        });
    for (auto& caller : callers) caller.join();
}

// Four times more threads than this machine has processors, with work of very different length.
void an_oversubscribed_machine(Clock::time_point end) {
    set_num_threads(4 * int(std::thread::hardware_concurrency()) + 1);
    for (int job = 0; Clock::now() < end; ++job) check_job(64, job % 5 * 500);
}

// A child, forked between jobs or while another thread runs one, computes with threads of its own.
void forks(Clock::time_point end) {
    set_num_threads(3);
    std::atomic<bool> stop{false};
    std::thread other([&] {
        while (!stop) check_job(8, 50);
    });
    while (Clock::now() < end) {
        pid_t child = fork();
        if (child == 0) {
            for (int job = 0; job < 20; ++job) check_job(16, 50);
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        if (status != 0) fail("a forked child could not compute");
    }
    stop = true;
    other.join();
}

// What a chunk throws comes out of the job that it belongs to, when nobody works on that job any more, and of no other.
void chunks_that_throw(Clock::time_point end) {
    for (int round = 0; Clock::now() < end; ++round) {
        set_num_threads(1 + round / 50 % 4);
        std::atomic<int> inside{0};
        bool is_caught = false;
        try {
            parallel_for(12, [&](int64_t chunk, int) {
                ++inside;
                spin(20'000);
                --inside;
                if (chunk % 5 == round % 5) throw int(chunk);
            });
        } catch (int) {
            is_caught = true;
        }
        if (!is_caught) fail("what a chunk threw was lost");
        if (inside != 0) fail("a job was left while a chunk of it ran");
        check_job(12, 20);
    }
}

void print_cost_of_an_empty_job() {
    set_num_threads(2);
    double best = 1e9;
    for (int repeat = 0; repeat < 200; ++repeat) {
        auto start = Clock::now();
        for (int job = 0; job < 100; ++job) parallel_for(2, [](int64_t, int) {});
        std::chrono::duration<double, std::micro> taken = Clock::now() - start;
        if (taken.count() / 100 < best) best = taken.count() / 100;
    }
    std::printf("%.2f us\n", best);
}

}  // namespace

int main(int, char** arguments) {
    if (arguments[1] && !std::strcmp(arguments[1], "time")) {
        print_cost_of_an_empty_job();
        return 0;
    }
    double seconds = arguments[1] ? std::atof(arguments[1]) : 3;
    auto share = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds / 7));
    for (auto check : {many_tiny_jobs, pauses_between_jobs, changing_thread_counts, many_callers,
                       an_oversubscribed_machine, forks, chunks_that_throw})
        check(Clock::now() + share);
    std::puts("ok");
}
