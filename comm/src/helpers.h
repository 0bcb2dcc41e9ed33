// Helpers: threads of a process that take part in work which another thread has begun.
//
//   class Job : public Helped {
//     bool wants_help() const override;  // whether one more thread has something to do
//     void help() override;              // on a helper's thread; returns when nothing is left
//   };
//   auto helpers = Helpers::shared(3);
//   helpers->offer(job);
//   ...                                  // the owner works, too
//   helpers->withdraw(job);              // no helper enters any more
//   while (job.helped()) ...             // until the last one has left
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "event_count.h"

namespace afd_comm {

class Helped {
 public:
  virtual ~Helped() = default;
  // Called with a lock held.
  virtual bool wants_help() const = 0;
  virtual void help() = 0;
  // Whether a helper is in help().
  bool helped() const { return inside_.load(std::memory_order_acquire) != 0; }

 private:
  friend class Helpers;
  std::atomic<int> inside_{0};
};

// Thread safe.
class Helpers {
 public:
  // `spin_ns`: how long a thread looks for more work before it sleeps.
  explicit Helpers(uint64_t spin_ns) : spin_ns_(spin_ns) {}
  ~Helpers();  // nothing may be offered any more
  Helpers(const Helpers&) = delete;

  // The process's helpers, of at least so many threads, and so many more than before unless they
  // would take more than half of the CPUs. They end with their last user. A forked child has its
  // own. Throws CommError.
  static std::shared_ptr<Helpers> shared(std::size_t threads);

  // Allocates only while more is offered at a time than ever before.
  void offer(Helped& job);
  void withdraw(Helped& job);

 private:
  void grow(std::size_t threads);
  void run();
  // Helps a job that wants it. Returns false if there is none, or the lock is not owned.
  bool serve(std::unique_lock<std::mutex> lock);
  Helped* enter();  // needs the lock

  const uint64_t spin_ns_;
  std::atomic<bool> stop_{false};
  std::atomic<uint32_t> offered_{0};  // how many are
  EventCount offers_;
  std::mutex mutex_;  // guards the members below
  std::vector<Helped*> jobs_;
  std::size_t turn_ = 0;  // whose turn it is
  std::vector<std::thread> threads_;
};

}  // namespace afd_comm
