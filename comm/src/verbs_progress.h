// Backend verbs: the thread that polls one NIC's completion queues.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "afd_comm/process.h"
#include "poller.h"
#include "verbs_library.h"

namespace afd_comm {

// Receives the completions of one queue. Called on the progress thread, so it must not block.
class CompletionSink {
 public:
  virtual ~CompletionSink() = default;
  virtual void on_completion(const ib::Wc& completion) = 0;
  // Called once before the completions that were polled together.
  virtual void before(const ib::Wc* /*completions*/, int /*count*/) {}
};

// The NIC's poller, and the completion queues that it polls.
class Progress {
 public:
  // `cpus`: where the thread may run; empty: anywhere. `spin_ns`: how long it polls without a
  // completion before it sleeps until the NIC raises an event. `channel` must be non-blocking, and
  // outlive this, as must every queue until it is removed. Throws CommError.
  Progress(const Verbs& verbs, ib::CompChannel* channel, const std::string& name,
           const std::vector<int>& cpus, uint64_t spin_ns);
  ~Progress();
  Progress(const Progress&) = delete;

  void add(ib::Cq* cq, CompletionSink* sink);
  // After it returns, the sink is not called. Must not be called from a sink.
  void remove(ib::Cq* cq);
  // The thread, for items that belong to this NIC: so one core per NIC is enough.
  Poller& poller() { return poller_; }

 private:
  // One completion queue.
  struct Queue final : Polled {
    Queue(const Verbs& v, ib::Cq* q, CompletionSink* s) : verbs(v), cq(q), sink(s) {}
    bool poll() override;
    // The NIC raises an event for every completion.
    bool armed() const override { return false; }
    const Verbs& verbs;
    ib::Cq* cq;
    CompletionSink* sink;
  };
  // Sleeps until the NIC raises an event.
  class Events;

  const Verbs& verbs_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Queue>> queues_;  // guarded by mutex_
  Events* events_;                              // owned by poller_
  Poller poller_;
};

// Parses a sysfs list of CPUs such as "0-3,8,10-11", up to the first invalid character. Pure.
std::vector<int> parse_cpulist(const std::string& text);
// Returns the CPUs of the RDMA device's NUMA node that this thread may use. Empty if the kernel
// does not tell, or none is allowed.
std::vector<int> cpus_near(const std::string& device, const std::string& sysfs = "/sys");

}  // namespace afd_comm
