// A fake libibverbs for tests without RDMA hardware. It has two RoCE devices, fake0 and fake1,
// whose packets are copies within the process, or to another process of this host (fake_remote.h).
// Memory registered as a dma-buf is copied by the GPU's driver (fake_gpu_memory.h). Build it as a
// shared library and pass its path as VerbsOptions::library.
//
// AFD_FAKE_NIC_GBPS: how fast each device sends, Gb/s; not set: as fast as it can.
// AFD_FAKE_NIC_BYTES=0: payloads take their time on the line, but are not copied, except from
// device memory to another process. To measure only.
//
// One thread per queue pair simulates the wire, so messages of different queue pairs can overtake
// each other. The fake_* functions at the end inject faults.
#include "fake_ibverbs.h"

#include <cerrno>

namespace {

int poll_cq(ib::Cq* cq, int entries, ib::Wc* out) {
  auto* const queue = static_cast<FakeCq*>(cq);
  if (queue->count.load(std::memory_order_acquire) == 0) return 0;
  const std::lock_guard<Lock> lock(world);
  auto& done = queue->done;
  if (receivers_stopped && !done.empty() && done.front().opcode == ib::kWcRecvWithImm) return 0;
  int n = 0;
  for (; n < entries && !done.empty(); ++n) {
    out[n] = done.front();
    done.pop_front();
  }
  queue->count.store(done.size(), std::memory_order_release);
  return n;
}

int req_notify_cq(ib::Cq* cq, int) {
  const std::lock_guard<Lock> lock(world);
  static_cast<FakeCq*>(cq)->armed = true;
  return 0;
}

int post_send(ib::Qp* base, ib::SendWr* wr, ib::SendWr** bad) {
  const std::lock_guard<Lock> lock(world);
  auto* qp = static_cast<FakeQp*>(base);
  for (; wr != nullptr; wr = wr->next) {
    if (qp->sends.size() >= qp->send_limit) {
      *bad = wr;
      return ENOMEM;
    }
    Request request{*wr, wr->num_sge != 0 ? *wr->sg_list : ib::Sge{}, {}, {}};
    request.line = take_line(qp->index, request.sge.length);
    if (wr->num_sge != 0 && wr->send_flags & ib::kInline) {
      const auto* data = reinterpret_cast<const uint8_t*>(wr->sg_list->addr);
      request.copied.assign(data, data + wr->sg_list->length);
    }
    if (qp->failed) {
      qp->complete(qp->send_queue(), wr->wr_id, ib::kWcFlushed, 0);
    } else {
      qp->sends.push_back(std::move(request));
    }
  }
  qp->posted.fetch_add(1, std::memory_order_release);
  qp->changed.notify_one();
  return 0;
}

int post_recv(ib::Qp* base, ib::RecvWr* wr, ib::RecvWr** bad) {
  const std::lock_guard<Lock> lock(world);
  auto* qp = static_cast<FakeQp*>(base);
  if (qp->failed) return 0;  // as soft-RoCE does: the request is accepted and ignored
  if (qp->receives.size() >= qp->recv_limit) {
    *bad = wr;
    return ENOMEM;
  } else {
    qp->receives.push_back(wr->wr_id);
  }
  return 0;
}

int index_of(const char* name) {
  for (const FakeDevice& device : devices)
    if (device.name == name) return device.index;
  return -1;
}

}  // namespace

extern "C" {

ib::Device** ibv_get_device_list(int* count) {
  *count = device_count;
  auto** list = new ib::Device*[kDevices + 1]();
  for (int i = 0; i < device_count; ++i) list[i] = reinterpret_cast<ib::Device*>(&devices[i]);
  return list;
}
void ibv_free_device_list(ib::Device** list) { delete[] list; }
const char* ibv_get_device_name(ib::Device* device) {
  return reinterpret_cast<FakeDevice*>(device)->name.c_str();
}
ib::Context* ibv_open_device(ib::Device* device) {
  static std::once_flag listening;
  std::call_once(listening, [] { fake_remote::listen_for_peers(serve_peer); });
  auto* context = new FakeContext{};
  context->device = device;
  context->index = reinterpret_cast<FakeDevice*>(device)->index;
  context->ops.poll_cq = poll_cq;
  context->ops.req_notify_cq = req_notify_cq;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  return context;
}
int ibv_close_device(ib::Context* context) {
  delete static_cast<FakeContext*>(context);
  return 0;
}
int ibv_query_device(ib::Context*, ib::DeviceAttr* attr) {
  *attr = {};
  attr->max_qp_wr = 4096;
  attr->max_cqe = 65536;
  return 0;
}
int ibv_query_port(ib::Context* context, uint8_t port, ib::PortAttr* attr) {
  if (port != 1) return EINVAL;
  const std::lock_guard<Lock> lock(world);
  *attr = {};
  attr->state =
      port_down[static_cast<FakeContext*>(context)->index] ? ib::kPortDown : ib::kPortActive;
  attr->active_mtu = 5;
  attr->gid_tbl_len = 1;
  attr->max_msg_sz = kMaxMessage;
  attr->link_layer = ib::kLinkEthernet;
  return 0;
}
int ibv_query_gid(ib::Context* context, uint8_t, int index, ib::Gid* gid) {
  if (index != 0) return EINVAL;
  // The address names the process, because that is where packets go.
  const int pid = getpid();
  ib::Gid address = {0xfd};
  std::memcpy(address + 4, &pid, sizeof pid);
  address[14] = static_cast<uint8_t>(static_cast<FakeContext*>(context)->index);
  address[15] = 1;
  std::memcpy(gid, address, sizeof address);
  return 0;
}
ib::Pd* ibv_alloc_pd(ib::Context* context) { return new ib::Pd{context, 0}; }
int ibv_dealloc_pd(ib::Pd* pd) {
  delete pd;
  return 0;
}
ib::Mr* ibv_reg_mr(ib::Pd* pd, void* addr, std::size_t length, int access) {
  const std::lock_guard<Lock> lock(world);
  if (register_errno != 0 || refused_device.count(reinterpret_cast<uint64_t>(addr)) != 0) {
    errno = register_errno != 0 ? register_errno : EFAULT;
    return nullptr;
  }
  auto* mr = new FakeMr{};
  mr->context = pd->context;
  mr->addr = addr;
  mr->length = length;
  mr->lkey = mr->rkey = next_number++;
  mr->access = static_cast<unsigned>(access);
  regions[mr->rkey] = mr;
  return mr;
}
ib::Mr* ibv_reg_dmabuf_mr(ib::Pd* pd, uint64_t, std::size_t length, uint64_t iova, int fd,
                          int access) {
  if (fd < 0) {
    errno = EBADF;
    return nullptr;
  }
  if (devices_refused) {
    const std::lock_guard<Lock> lock(world);
    refused_device.insert(iova);
    errno = EOPNOTSUPP;
    return nullptr;
  }
  ++dmabufs;
  ib::Mr* const mr = ibv_reg_mr(pd, reinterpret_cast<void*>(iova), length, access);
  if (mr != nullptr) static_cast<FakeMr*>(mr)->device = true;
  return mr;
}
int ibv_dereg_mr(ib::Mr* mr) {
  std::unique_lock<Lock> lock(world);
  regions.erase(mr->rkey);
  auto* const ours = static_cast<FakeMr*>(mr);
  while (ours->busy != 0) {
    lock.unlock();
    usleep(10);
    lock.lock();
  }
  delete ours;
  return 0;
}
ib::CompChannel* ibv_create_comp_channel(ib::Context* context) {
  auto* channel = new FakeChannel{};
  channel->context = context;
  channel->fd = eventfd(0, EFD_CLOEXEC);
  return channel;
}
int ibv_destroy_comp_channel(ib::CompChannel* channel) {
  close(channel->fd);
  delete static_cast<FakeChannel*>(channel);
  return 0;
}
ib::Cq* ibv_create_cq(ib::Context* context, int entries, void*, ib::CompChannel* channel, int) {
  auto* cq = new FakeCq{};
  cq->context = context;
  cq->channel = channel;
  cq->cqe = entries;
  return cq;
}
int ibv_destroy_cq(ib::Cq* cq) {
  const std::lock_guard<Lock> lock(world);
  auto& events = static_cast<FakeChannel*>(cq->channel)->events;
  std::deque<ib::Cq*> others;
  for (ib::Cq* one : events)
    if (one != cq) others.push_back(one);
  events.swap(others);
  delete static_cast<FakeCq*>(cq);
  return 0;
}
int ibv_get_cq_event(ib::CompChannel* base, ib::Cq** cq, void** context) {
  const std::lock_guard<Lock> lock(world);
  auto* channel = static_cast<FakeChannel*>(base);
  uint64_t count = 0;
  static_cast<void>(!read(channel->fd, &count, sizeof count));
  if (channel->events.empty()) return -1;
  *cq = channel->events.front();
  *context = nullptr;
  channel->events.pop_front();
  return 0;
}
void ibv_ack_cq_events(ib::Cq*, unsigned) {}
ib::Qp* ibv_create_qp(ib::Pd* pd, ib::QpInitAttr* attr) {
  const std::lock_guard<Lock> lock(world);
  if (attr->cap.max_inline_data > kMaxInline) {
    errno = EINVAL;
    return nullptr;
  }
  auto* qp = new FakeQp{};
  qp->context = pd->context;
  qp->pd = pd;
  qp->send_cq = attr->send_cq;
  qp->recv_cq = attr->recv_cq;
  qp->send_limit = attr->cap.max_send_wr;
  qp->recv_limit = attr->cap.max_recv_wr;
  qp->index = static_cast<FakeContext*>(pd->context)->index;
  qp->qp_num = next_number++;
  qps[qp->qp_num] = qp;
  qp->wire = std::thread([qp] { qp->run(); });
  return qp;
}
int ibv_modify_qp(ib::Qp* base, ib::QpAttr* attr, int) {
  std::unique_lock<Lock> lock(world);
  auto* qp = static_cast<FakeQp*>(base);
  if (attr->qp_state == ib::kQpRtr) {
    qp->peer = attr->dest_qp_num;
    std::memcpy(&qp->peer_pid, attr->ah_attr.grh.dgid + 4, sizeof qp->peer_pid);
    if (qp->peer_pid == getpid()) qp->peer_pid = 0;
  }
  if (attr->qp_state == ib::kQpRts) qp->connected = true;
  if (attr->qp_state == ib::kQpError && !qp->failed) qp->fail();
  if (attr->qp_state == ib::kQpError) settle(*qp, lock);
  qp->changed.notify_one();
  return 0;
}
int ibv_destroy_qp(ib::Qp* base) {
  auto* qp = static_cast<FakeQp*>(base);
  {
    std::unique_lock<Lock> lock(world);
    qps.erase(qp->qp_num);
    qp->stop = true;
    settle(*qp, lock);
    if (qp->away >= 0) shutdown(qp->away, SHUT_RDWR);
    qp->changed.notify_one();
  }
  qp->wire.join();
  if (qp->away >= 0) close(qp->away);
  delete qp;
  return 0;
}
const char* ibv_wc_status_str(int status) {
  return status == ib::kWcRetryExceeded ? "transport retry counter exceeded" : "error";
}

// -- fault injection

void fake_port(const char* device, int up) {
  const std::lock_guard<Lock> lock(world);
  port_down[index_of(device)] = up == 0;
}
void fake_lose_acks(const char* device, int lose) {
  const std::lock_guard<Lock> lock(world);
  ack_lost[index_of(device)] = lose != 0;
}
// A NIC that neither acknowledges nor fails what it is given, until its queue pairs are failed.
void fake_mute(const char* device, int on) {
  const std::lock_guard<Lock> lock(world);
  mute[index_of(device)] = on != 0;
}
void fake_delay_us(int us) {
  const std::lock_guard<Lock> lock(world);
  delay_us = us;
}
// Simulates stopped receiver processes: the NIC still writes data, but no completion is delivered.
void fake_stop_receivers(int stop) {
  const std::lock_guard<Lock> lock(world);
  receivers_stopped = stop != 0;
}
// Puts `word` at byte `at` of the next write with an immediate, as a hostile sender could.
void fake_damage_record(int at, uint32_t word) {
  const std::lock_guard<Lock> lock(world);
  damage_at = at;
  damage = word;
}
// Makes every later registration fail with this errno; 0: registrations succeed.
void fake_refuse_memory(int error) {
  const std::lock_guard<Lock> lock(world);
  register_errno = error;
}
// Makes every later registration of device memory fail, with and without a dma-buf.
void fake_refuse_devices(int refuse) { devices_refused = refuse != 0; }
// Number of dma-buf registrations so far.
int fake_dmabufs() { return dmabufs; }
void fake_devices(int count) { device_count = count; }
// Number of existing queue pairs.
int fake_queue_pairs() {
  const std::lock_guard<Lock> lock(world);
  return static_cast<int>(qps.size());
}
}
