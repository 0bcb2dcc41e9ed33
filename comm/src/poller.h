// Poller: a thread that looks again and again at what no system call can wait for, such as a word
// that a GPU writes.
//
// To use it, derive from Polled and add() the item:
//
//   class Gate : public Polled {
//     bool poll() override;   // look once; on the poller's thread
//     bool armed() const override { return waiting_.load(); }
//   };
//   auto poller = Poller::shared();
//   poller->add(gate);
//   ...
//   poller->remove(gate);     // before the gate is destroyed
//
// Between two looks the thread spins, then yields its core, then naps while an item is armed, and
// sleeps while none is. Polling takes no lock and allocates nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "event_count.h"

namespace afd_comm {

class Polled {
 public:
  virtual ~Polled() = default;
  // Looks once. Returns whether it found work, after which the thread spins for a while. Called on
  // the poller's thread only. Must not block, throw, allocate, or call add() and remove().
  virtual bool poll() = 0;
  // Whether work may come without a call of wake(), e.g. from a GPU. While an item is armed the
  // thread naps for 20 us at most. Any thread may change the answer; if it becomes true, call
  // wake() behind the change.
  virtual bool armed() const = 0;
};

// Where a poller's thread sleeps while no item is armed.
class Rest {
 public:
  // Looks at all items once more. Returns true if the thread must not sleep.
  using Look = bool (*)(void* poller);

  virtual ~Rest() = default;
  // Sleeps until wake(), an event of its own, or 100 ms have passed. Must call `look` once no
  // wake-up can be missed any more, and return if it is true.
  virtual void sleep(Look look, void* poller) = 0;
  virtual void wake() = 0;
};

class Poller {
 public:
  // `cpus`: where the thread may run, a preference; empty: anywhere. `spin_ns`: how long it spins
  // after the last work. `rest`: null: a futex. Throws CommError.
  Poller(const std::string& name, const std::vector<int>& cpus, uint64_t spin_ns,
         std::unique_ptr<Rest> rest = nullptr);
  // All items must have been removed.
  ~Poller();
  Poller(const Poller&) = delete;

  // The process's poller for what belongs to no NIC. It ends with its last user. A forked child has
  // one of its own. Throws CommError.
  static std::shared_ptr<Poller> shared();

  // The item is polled until it is removed. Thread safe.
  void add(Polled& item);
  // After it returns the item is not polled, and may be destroyed. Waits for one round of the
  // thread. Thread safe.
  void remove(Polled& item);
  // Makes the thread look soon if it sleeps; else costs one atomic addition.
  void wake() { rest_->wake(); }

 private:
  void run();
  bool poll_all();
  bool any_armed() const;
  void take_changes();
  void changed(std::unique_lock<std::mutex> lock, bool wait);
  static bool look(void* poller);

  const uint64_t spin_ns_;
  const uint64_t yield_ns_;
  std::unique_ptr<Rest> rest_;
  std::vector<Polled*> polled_;  // the thread's own copy
  std::mutex mutex_;
  std::condition_variable taken_;
  std::vector<Polled*> items_;
  std::atomic<uint64_t> version_{0};
  std::atomic<uint64_t> seen_{0};
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// How long to spin by default, ns: 50 us, on at most two usable CPUs 5 us. Measurements: README.
uint64_t default_spin_ns();

}  // namespace afd_comm
