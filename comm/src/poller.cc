#include "poller.h"

#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "afd_comm/process.h"
#include "per_process.h"

namespace afd_comm {
namespace {

constexpr int kFewCpus = 2;
constexpr uint64_t kSpinNs = 50000;
constexpr uint64_t kSpinNsFewCpus = 5000;
// Yields between two looks cover the time between two messages of a decode step. On few CPUs
// other threads need the core.
constexpr uint64_t kYieldNs = 2000000;
constexpr uint64_t kYieldNsFewCpus = 50000;
constexpr uint64_t kNapNs = 20000;
constexpr uint64_t kSleepNs = 100000000;
// By default the kernel adds up to 50 us to a nap.
constexpr unsigned long kTimerSlackNs = 1000;

class Futex final : public Rest {
 public:
  void sleep(Look look, void* poller) override {
    const EventCount::Waiter waiter(events_);
    if (!look(poller)) waiter.sleep(kSleepNs);
  }
  void wake() override { events_.notify(); }

 private:
  EventCount events_;
};

}  // namespace

uint64_t default_spin_ns() { return usable_cpus() > kFewCpus ? kSpinNs : kSpinNsFewCpus; }

Poller::Poller(const std::string& name, const std::vector<int>& cpus, uint64_t spin_ns,
               std::unique_ptr<Rest> rest)
    : spin_ns_(spin_ns),
      yield_ns_(usable_cpus() > kFewCpus ? kYieldNs : kYieldNsFewCpus),
      rest_(rest != nullptr ? std::move(rest) : std::make_unique<Futex>()) {
  thread_ = start_thread("afd-" + name, [this] { run(); });
  prefer_cpus(thread_, cpus);
}

Poller::~Poller() {
  stop_.store(true, std::memory_order_release);
  changed(std::unique_lock<std::mutex>(mutex_), false);
  thread_.join();
}

std::shared_ptr<Poller> Poller::shared() {
  return of_this_process<Poller>(
      [] { return std::make_shared<Poller>("poller", std::vector<int>(), default_spin_ns()); });
}

void Poller::add(Polled& item) {
  std::unique_lock<std::mutex> lock(mutex_);
  items_.push_back(&item);
  changed(std::move(lock), false);
}

void Poller::remove(Polled& item) {
  std::unique_lock<std::mutex> lock(mutex_);
  items_.erase(std::remove(items_.begin(), items_.end(), &item), items_.end());
  changed(std::move(lock), true);
}

void Poller::changed(std::unique_lock<std::mutex> lock, bool wait) {
  const uint64_t mine = version_.fetch_add(1, std::memory_order_seq_cst) + 1;
  rest_->wake();
  if (wait) taken_.wait(lock, [this, mine] { return seen_.load() >= mine; });
}

void Poller::take_changes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  polled_ = items_;
  seen_.store(version_.load(std::memory_order_relaxed));
  taken_.notify_all();
}

bool Poller::poll_all() {
  bool any = false;
  for (Polled* const item : polled_) any = item->poll() || any;
  return any;
}

bool Poller::any_armed() const {
  return std::any_of(polled_.begin(), polled_.end(), [](const Polled* p) { return p->armed(); });
}

bool Poller::look(void* poller) {
  auto& self = *static_cast<Poller*>(poller);
  return self.version_.load(std::memory_order_seq_cst) !=
             self.seen_.load(std::memory_order_relaxed) ||
         self.poll_all() || self.any_armed();
}

void Poller::run() {
  prctl(PR_SET_TIMERSLACK, kTimerSlackNs);
  uint64_t idle_since = 0;  // 0: not idle
  while (!stop_.load(std::memory_order_acquire)) {
    if (version_.load(std::memory_order_acquire) != seen_.load(std::memory_order_relaxed))
      take_changes();
    if (poll_all()) {
      idle_since = 0;
      continue;
    }
    const uint64_t now = now_ns();
    if (idle_since == 0) idle_since = now;
    const uint64_t idle = now - idle_since;
    if (idle < spin_ns_ && !polled_.empty()) {
      relax();
    } else if (!any_armed()) {
      rest_->sleep(&look, this);
      idle_since = 0;
    } else if (idle < yield_ns_) {
      sched_yield();
    } else {
      nap(kNapNs);
    }
  }
}

}  // namespace afd_comm
