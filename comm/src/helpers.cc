#include "helpers.h"

#include <algorithm>

#include "afd_comm/process.h"
#include "afd_comm/types.h"
#include "per_process.h"
#include "poller.h"

namespace afd_comm {
namespace {

constexpr uint64_t kHelperSleepNs = 1000000000;

}  // namespace

std::shared_ptr<Helpers> Helpers::shared(std::size_t threads) {
  const auto make = [] { return std::make_shared<Helpers>(default_spin_ns()); };
  std::shared_ptr<Helpers> helpers = of_this_process<Helpers>(make);
  helpers->grow(threads);
  return helpers;
}

Helpers::~Helpers() {
  stop_.store(true, std::memory_order_release);
  offers_.notify();
  for (std::thread& thread : threads_) thread.join();
}

void Helpers::grow(std::size_t threads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto half = static_cast<std::size_t>(usable_cpus()) / 2;
  const std::size_t wanted = std::min(threads_.size() + threads, std::max(threads, half));
  while (threads_.size() < wanted) threads_.push_back(start_thread("afd-help", [this] { run(); }));
}

void Helpers::offer(Helped& job) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(&job);
    offered_.fetch_add(1, std::memory_order_release);
  }
  offers_.notify();
}

void Helpers::withdraw(Helped& job) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find(jobs_.begin(), jobs_.end(), &job);
  if (found == jobs_.end()) return;
  jobs_.erase(found);
  offered_.fetch_sub(1, std::memory_order_release);
}

bool Helpers::serve(std::unique_lock<std::mutex> lock) {
  Helped* const job = lock.owns_lock() ? enter() : nullptr;
  if (job == nullptr) return false;
  lock.unlock();
  job->help();
  job->inside_.fetch_sub(1, std::memory_order_release);
  return true;
}

Helped* Helpers::enter() {
  for (std::size_t i = 0; i < jobs_.size(); ++i) {
    Helped* const job = jobs_[turn_++ % jobs_.size()];
    if (!job->wants_help()) continue;
    job->inside_.fetch_add(1, std::memory_order_relaxed);
    return job;
  }
  return nullptr;
}

void Helpers::run() {
  uint64_t idle_since = 0;  // 0: not idle
  while (!stop_.load(std::memory_order_acquire)) {
    // Who only looks must not keep the others from the lock.
    if (offered_.load(std::memory_order_acquire) != 0 &&
        serve(std::unique_lock<std::mutex>(mutex_, std::try_to_lock))) {
      idle_since = 0;
      continue;
    }
    const uint64_t now = now_ns();
    if (idle_since == 0) idle_since = now;
    if (now - idle_since < spin_ns_) {
      relax_us();
      continue;
    }
    const EventCount::Waiter waiter(offers_);
    if (!stop_.load(std::memory_order_acquire) && !serve(std::unique_lock<std::mutex>(mutex_)))
      waiter.sleep(kHelperSleepNs);
    idle_since = 0;
  }
}

}  // namespace afd_comm
