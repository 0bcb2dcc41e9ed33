// Backend verbs: the thread that polls one NIC's completion queues.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "afd_comm/process.h"
#include "verbs_library.h"

namespace afd_comm {

// Receives the completions of one queue. Called on the progress thread, so it must not block.
class CompletionSink {
 public:
  virtual ~CompletionSink() = default;
  virtual void on_completion(const ib::Wc& completion) = 0;
};

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

 private:
  struct Entry {
    ib::Cq* cq;
    CompletionSink* sink;
  };
  void run();
  bool poll_all();
  void take_changes();
  void sleep();
  void changed(std::unique_lock<std::mutex> lock, bool wait);

  const Verbs& verbs_;
  ib::CompChannel* channel_;
  const uint64_t spin_ns_;
  Fd wake_;
  std::vector<Entry> polled_;  // the thread's own copy
  std::mutex mutex_;
  std::condition_variable taken_;
  std::vector<Entry> entries_;
  std::atomic<uint64_t> version_{0};
  uint64_t seen_ = 0;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// Parses a sysfs list of CPUs such as "0-3,8,10-11", up to the first invalid character. Pure.
std::vector<int> parse_cpulist(const std::string& text);
// Returns the CPUs of the RDMA device's NUMA node that this thread may use. Empty if the kernel
// does not tell, or none is allowed.
std::vector<int> cpus_near(const std::string& device);

}  // namespace afd_comm
