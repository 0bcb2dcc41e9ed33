#include "proxy_link.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "afd_comm/process.h"

namespace afd_comm {
namespace {

// How long close() waits for messages whose tickets have been written.
constexpr int64_t kLingerUs = 1000000;
constexpr uint64_t kPauseNs = 5000;
constexpr uint64_t kInterruptNs = 1000000;

uint64_t bytes_of(const Message& m) {
  uint64_t total = 0;
  for (std::size_t i = 0; i < m.part_count; ++i) total += m.parts[i].nbytes;
  return total;
}

// Gives the tickets of a recording back. May outlive the link.
class TicketRecording final : public Recording {
 public:
  explicit TicketRecording(std::shared_ptr<Tickets> tickets)
      : tickets_(std::move(tickets)), id_(tickets_->record()) {}
  ~TicketRecording() override { tickets_->release(id_); }

 private:
  std::shared_ptr<Tickets> tickets_;
  uint64_t id_;
};

}  // namespace

bool has_rows(const Message& m) {
  for (std::size_t i = 0; i + m.whole < m.part_count; ++i)
    if (m.header.count == 0 || m.parts[i].nbytes % m.header.count != 0) return false;
  return true;
}

void keep_rows(Message& m, uint32_t rows) {
  if (rows == m.header.count) return;
  m.header.nbytes = 0;
  for (std::size_t i = 0; i < m.part_count; ++i) {
    if (i + m.whole < m.part_count) m.parts[i].nbytes = m.parts[i].nbytes / m.header.count * rows;
    m.header.nbytes += static_cast<int64_t>(m.parts[i].nbytes);
  }
  m.header.count = rows;
}

ProxyLink::ProxyLink(std::unique_ptr<DrivenLink> link, const LinkOptions& options)
    : Link(options.trace),
      options_(options),
      creator_(getpid()),
      link_(std::move(link)),
      limits_(link_->limits()) {
  if (limits_.claimed.count == 0) limits_.claimed = {0, limits_.slots};
}

ProxyLink::~ProxyLink() {
  close();
  if (getpid() != creator_) {
    // In a forked child the poller's thread does not exist, and the driver's state is not valid.
    static_cast<void>(new std::shared_ptr<Poller>(std::move(poller_)));
    static_cast<void>(pinned_.release());
    for (auto& buffer : buffers_) static_cast<void>(buffer.release());
    static_cast<void>(stage_.release());
    static_cast<void>(post_stage_.release());
    static_cast<void>(post_buffer_.release());
    return;
  }
  link_.reset();  // no NIC reads a buffer from here on
  pinned_.reset();
  if (cells_ != nullptr) munmap(cells_, cells_bytes_);
}

bool ProxyLink::sends_alone() const {
  return options_.device.is_cpu() || (!staged_.load() && link_->reads_devices());
}

std::string ProxyLink::notes() const {
  std::string notes = link_->notes();
  if (!sends_alone() && notes.empty())
    notes = std::string(backend()) + " copies messages of " + device_text(options_.device) +
            " through host memory";
  return notes;
}

Status ProxyLink::status() const {
  const Status failed = status_.load(std::memory_order_acquire);
  return failed != Status::Ok ? failed : link_->health();
}

void ProxyLink::set_trace(bool on) {
  Link::set_trace(on);
  link_->set_trace(on);
}

std::unique_ptr<Recording> ProxyLink::record() {
  return std::make_unique<TicketRecording>(tickets_);
}

// -- posts by the host

bool ProxyLink::in_place(const Message& m) {
  if (options_.device.is_cpu() || cannot_adopt_.load()) return options_.device.is_cpu();
  try {
    for (std::size_t i = 0; i < m.part_count; ++i)
      if (m.parts[i].nbytes != 0 &&
          !link_->adopt(m.parts[i].data, m.parts[i].nbytes, options_.device))
        return false;
    return true;
  } catch (const CommError&) {
    // The driver or the NIC refused: from now on everything is staged.
    cannot_adopt_.store(true);
    return false;
  }
}

Status ProxyLink::post(const Message& m) {
  if (options_.device.is_cpu() || bytes_of(m) == 0) return link_->post(m);
  const Status checked = check_message(m, limits_.slots, limits_.slot_bytes, limits_.claimed);
  if (checked != Status::Ok) return checked;
  if (!in_place(m)) return post_staged(m);
  const Status posted = link_->post(m);
  // The caller may change its memory on return.
  return posted == Status::Ok ? link_->wait_sent(m.slot, options_.timeout_us) : posted;
}

std::optional<Status> ProxyLink::begin(const Message& m) {
  if (options_.device.is_cpu() || bytes_of(m) == 0) return link_->begin(m);
  return post(m);
}

std::optional<Status> ProxyLink::begin_kept(const Message& m) {
  if (options_.device.is_cpu() || bytes_of(m) == 0) return link_->begin(m);
  // In place, nobody waits until the NIC has read the memory: it stays as it is.
  return in_place(m) ? link_->post(m) : post_staged(m);
}

std::unique_ptr<StageBuffer> ProxyLink::make_buffer(uint64_t nbytes) {
  auto buffer = std::make_unique<StageBuffer>(accelerator_, nbytes);
  link_->register_memory(buffer->host(), buffer->nbytes(), Device{});
  staged_.store(true);
  return buffer;
}

Status ProxyLink::post_staged(const Message& m) {
  const std::lock_guard<std::mutex> lock(posting_);
  if (post_stage_ == nullptr) {
    const std::lock_guard<std::mutex> setting_up(mutex_);
    if (accelerator_ == nullptr) accelerator_ = open_accelerator(options_.device);
    post_stage_ = std::make_unique<Stage>(accelerator_);
  }
  if (post_buffer_ == nullptr || post_buffer_->nbytes() < bytes_of(m)) {
    auto larger =
        make_buffer(std::max(bytes_of(m), 2 * (post_buffer_ ? post_buffer_->nbytes() : 0)));
    if (post_buffer_ != nullptr) old_buffers_.push_back(std::move(post_buffer_));
    post_buffer_ = std::move(larger);
  }
  Message copied = m;
  post_stage_->begin(copied, *post_buffer_);
  const uint64_t deadline = deadline_after_us(options_.timeout_us);
  uint64_t next_interrupt = now_ns() + kInterruptNs;
  bool begun = false;
  while (true) {
    post_stage_->advance();
    Status outcome = Status::Ok;
    bool done = false;
    if (!begun) {
      const auto start = link_->start(copied, post_stage_->available(), outcome);
      begun = start == DrivenLink::Start::Begun;
      done = start == DrivenLink::Start::Done;
    } else if (const std::optional<Status> status = link_->go_on(m.slot)) {
      outcome = *status;
      done = true;
    }
    if (done)
      return outcome == Status::Ok ? link_->wait_sent(m.slot, options_.timeout_us) : outcome;
    const uint64_t now = now_ns();
    bool give_up = now >= deadline;
    if (now >= next_interrupt) {
      next_interrupt = now + kInterruptNs;
      give_up = give_up || (options_.interrupt != nullptr && options_.interrupt());
    }
    if (give_up) return begun ? link_->give_up(m.slot) : Status::Deadline;
    if (post_stage_->complete()) nap(kPauseNs);
  }
}

// -- enqueue, on the caller's thread

void ProxyLink::start_proxy() {
  if (poller_ != nullptr) return;
  if (accelerator_ == nullptr) accelerator_ = open_accelerator(options_.device);
  cells_bytes_ = limits_.claimed.count * sizeof(Cell);
  void* const memory =
      mmap(nullptr, cells_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    throw CommError("cannot allocate the tickets of a link: " + errno_text(errno) +
                    "; free memory");
  cells_ = static_cast<Cell*>(memory);  // zeros: no tickets
  pinned_ = std::make_unique<Pinned>(accelerator_, cells_, cells_bytes_);
  used_.resize(limits_.claimed.count);
  poller_ = link_->poller();
  poller_->add(*this);
}

ProxyLink::Used& ProxyLink::use(uint32_t slot) {
  const uint32_t count = used_count_.load(std::memory_order_relaxed);
  for (uint32_t i = 0; i < count; ++i)
    if (used_[i]->slot == slot) return *used_[i];
  used_[count] = std::make_unique<Used>();
  used_[count]->slot = slot;
  used_count_.store(count + 1, std::memory_order_release);
  return *used_[count];
}

Status ProxyLink::enqueue(Stream stream, const Message& m, const uint32_t* count) {
  if (closed_.load(std::memory_order_acquire)) return Status::Closed;
  const Status failed = status();
  if (failed != Status::Ok) return failed;
  const Status checked = check_message(m, limits_.slots, limits_.slot_bytes, limits_.claimed);
  if (checked != Status::Ok) return checked;
  if (count != nullptr && !has_rows(m)) return Status::BadHeader;
  StreamOp op{StreamOp::Kind::Write, nullptr, 0, true};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    start_proxy();
    Prepared prepared{m, count, !in_place(m), accelerator_->capturing(stream)};
    Used& used = use(m.slot);
    if (prepared.staged) {
      if (stage_ == nullptr) stage_ = std::make_unique<Stage>(accelerator_);
      const StageBuffer* const buffer = used.buffer.load(std::memory_order_relaxed);
      if (buffer == nullptr || buffer->nbytes() < bytes_of(m)) {
        // The old one may be in use.
        buffers_.push_back(make_buffer(std::max(bytes_of(m), buffer ? 2 * buffer->nbytes() : 0)));
        used.buffer.store(buffers_.back().get(), std::memory_order_release);
      }
    }
    op.value = tickets_->add(prepared);
    op.address = pinned_->at(&cell(m.slot));
  }
  accelerator_->run(stream, &op, 1);
  poller_->wake();
  return Status::Ok;
}

// -- end

bool ProxyLink::is_idle() const {
  const uint32_t count = used_count_.load(std::memory_order_acquire);
  for (uint32_t i = 0; i < count; ++i)
    if (cell(used_[i]->slot).ticket.load() != kNoTicket) return false;
  return open_.load() == 0;
}

void ProxyLink::close() {
  if (closed_.exchange(true, std::memory_order_acq_rel)) return;
  if (getpid() == creator_) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (poller_ != nullptr) {
      const uint64_t deadline = deadline_after_us(std::min(options_.timeout_us, kLingerUs));
      poller_->wake();
      while (!is_idle() && now_ns() < deadline) nap(kPauseNs);
      poller_->remove(*this);
    }
  }
  link_->close();
}

}  // namespace afd_comm
