// Backend shm: the sender maps the receiver's region and writes into it directly.
#include <utility>

#include "copy.h"
#include "mapped_link.h"
#include "trace_clock.h"

namespace afd_comm {
namespace {

// Such a copy takes no longer than reading the clock, so one reading serves as its start and its
// end.
constexpr int64_t kOneReading = 1024;

class ShmLink final : public MappedLink {
 public:
  using MappedLink::MappedLink;

  const char* backend() const override { return "shm"; }
  bool may_block() const override { return false; }

  Status post(const Message& m) override {
    const bool trace = traced();
    const uint64_t posted = trace ? trace_now_ns() : 0;
    const Status checked = check(m, posted);
    if (checked != Status::Ok) return checked;
    uint8_t* payload = memory_.payload(m.slot);
    for (std::size_t i = 0; i < m.part_count; ++i)
      if (m.parts[i].nbytes != 0)
        copy(payload + m.parts[i].offset, m.parts[i].data, m.parts[i].nbytes);
    // A newer writer may have claimed the slot during the copy; its doorbell must not be
    // overwritten.
    if (!owns(m.slot)) return Status::Closed;
    const bool read_again = trace && m.header.nbytes > kOneReading;
    describe(memory_.control(m.slot), m, trace, posted, read_again ? trace_now_ns() : posted);
    memory_.ring(m.slot, m.flag);
    return Status::Ok;
  }
};

std::unique_ptr<Link> open_link_shm(const std::string& address, const LinkOptions& options) {
  Memory memory = Memory::open(parse_shm(address));
  if (memory.geometry().on_device)
    throw CommError(
        "the region's slots are on a GPU; open the link with device='cuda:N' or 'hip:N'");
  return std::make_unique<ShmLink>(std::move(memory), options);
}

}  // namespace

const Backend shm_backend{"shm", false, open_link_shm};

}  // namespace afd_comm
