#include "verbs_progress.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>

namespace afd_comm {
namespace {

constexpr int kBatch = 16;
// Longest sleep, in case a device loses an event.
constexpr int kSleepMs = 100;

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

std::vector<int> parse_cpulist(const std::string& text) {
  std::vector<int> out;
  std::istringstream in(text);
  int first = 0;
  while (in >> first) {
    int last = first;
    if (in.peek() == '-') in.ignore() >> last;
    for (int cpu = first; in && cpu <= last; ++cpu) out.push_back(cpu);
    if (in.peek() != ',') break;
    in.ignore();
  }
  return out;
}

std::vector<int> cpus_near(const std::string& device, const std::string& sysfs) {
  const std::string node = first_line(sysfs + "/class/infiniband/" + device + "/device/numa_node");
  if (node.empty() || node[0] == '-') return {};
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return {};
  std::vector<int> out;
  for (const int cpu :
       parse_cpulist(first_line(sysfs + "/devices/system/node/node" + node + "/cpulist")))
    if (cpu < CPU_SETSIZE && CPU_ISSET(static_cast<std::size_t>(cpu), &allowed)) out.push_back(cpu);
  return out;
}

class Progress::Events final : public Rest {
 public:
  Events(const Verbs& verbs, ib::CompChannel* channel)
      : verbs_(verbs), channel_(channel), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_)
      throw CommError("cannot open an eventfd: " + errno_text(errno) +
                      "; raise the open-files limit");
  }

  // A queue is added before, and removed after, the poller polls it.
  void set_queues(const std::vector<std::unique_ptr<Queue>>& queues) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queues_.clear();
    for (const auto& queue : queues) queues_.push_back(queue->cq);
  }

  void sleep(Look look, void* poller) override {
    // Either wake() sees that the thread sleeps, or `look` sees what came before wake().
    sleeping_.exchange(true, std::memory_order_seq_cst);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (ib::Cq* const cq : queues_) verbs_.req_notify_cq(cq, 0);
    }
    // Completions from before events were requested raise no event.
    if (!look(poller)) {
      pollfd fds[2] = {{wake_.get(), POLLIN, 0}, {channel_->fd, POLLIN, 0}};
      if (poll(fds, 2, kSleepMs) > 0) drain(fds[1].revents != 0);
    }
    sleeping_.store(false, std::memory_order_relaxed);
  }

  void wake() override {
    if (!sleeping_.exchange(false, std::memory_order_seq_cst)) return;
    const uint64_t one = 1;
    static_cast<void>(!write(wake_.get(), &one, sizeof one));
  }

 private:
  void drain(bool events) {
    uint64_t count = 0;
    static_cast<void>(!read(wake_.get(), &count, sizeof count));
    ib::Cq* cq = nullptr;
    void* context = nullptr;
    while (events && verbs_.get_cq_event(channel_, &cq, &context) == 0) verbs_.ack_cq_events(cq, 1);
  }

  const Verbs& verbs_;
  ib::CompChannel* channel_;
  Fd wake_;
  std::atomic<bool> sleeping_{false};
  std::mutex mutex_;  // taken by the thread only before it sleeps
  std::vector<ib::Cq*> queues_;
};

bool Progress::Queue::poll() {
  ib::Wc completions[kBatch];
  const int n = verbs.poll_cq(cq, kBatch, completions);
  if (n > 0) sink->before(completions, n);
  for (int i = 0; i < n; ++i) sink->on_completion(completions[i]);
  return n > 0;
}

Progress::Progress(const Verbs& verbs, ib::CompChannel* channel, const std::string& name,
                   const std::vector<int>& cpus, uint64_t spin_ns)
    : verbs_(verbs),
      events_(new Events(verbs, channel)),
      poller_(name, cpus, spin_ns, std::unique_ptr<Rest>(events_)) {}

Progress::~Progress() = default;

void Progress::add(ib::Cq* cq, CompletionSink* sink) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queues_.push_back(std::make_unique<Queue>(verbs_, cq, sink));
  events_->set_queues(queues_);
  poller_.add(*queues_.back());
}

void Progress::remove(ib::Cq* cq) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(queues_.begin(), queues_.end(),
                                  [cq](const auto& queue) { return queue->cq == cq; });
  if (found == queues_.end()) return;
  poller_.remove(**found);
  queues_.erase(found);
  events_->set_queues(queues_);
}

}  // namespace afd_comm
