// Device and pinned memory, both on the host. Fresh device memory is filled with 0xFF: NaN in every float type, -1 in
// every integer, so that a read of something never written shows.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "runtime.h"

using namespace emulator;

namespace {

constexpr aclError kOutOfMemory = 207001;
constexpr size_t kAlignment = 512;
constexpr size_t kGranularity = 2u << 20;

std::map<uintptr_t, size_t> device_blocks, pinned_blocks, reserved;
size_t in_use = 0;

size_t total_bytes() {
  static const size_t value = [] {
    const char* text = std::getenv("ASCEND_EMULATOR_MEMORY_MB");
    return static_cast<size_t>(text ? std::atoll(text) : 8192) << 20;
  }();
  return value;
}

bool contains(const std::map<uintptr_t, size_t>& blocks, const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto next = blocks.upper_bound(address);
  if (next == blocks.begin()) return false;
  --next;
  return address < next->first + next->second;
}

aclError allocate(void** pointer, size_t bytes) {
  Lock lock(mutex);
  if (in_use + bytes > total_bytes()) return kOutOfMemory;
  if (posix_memalign(pointer, kAlignment, bytes + 64)) return kOutOfMemory;
  std::memset(*pointer, 0xFF, bytes);
  device_blocks[reinterpret_cast<uintptr_t>(*pointer)] = bytes;
  in_use += bytes;
  return ACL_SUCCESS;
}

const char* copy_name(aclrtMemcpyKind kind) {
  switch (kind) {
    case ACL_MEMCPY_HOST_TO_DEVICE: return "copies_host_to_device";
    case ACL_MEMCPY_DEVICE_TO_HOST: return "copies_device_to_host";
    default: return "copies_device_to_device";
  }
}

struct Physical {
  size_t bytes;
};

}  // namespace

EXPORT aclError aclrtMalloc(void** pointer, size_t bytes, aclrtMemMallocPolicy) { return allocate(pointer, bytes); }
EXPORT aclError aclrtMallocAlign32(void** pointer, size_t bytes, aclrtMemMallocPolicy) {
  return allocate(pointer, bytes);
}
EXPORT aclError aclrtFree(void* pointer) {
  Lock lock(mutex);
  const auto found = device_blocks.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == device_blocks.end()) return ACL_SUCCESS;
  in_use -= found->second;
  device_blocks.erase(found);
  std::free(pointer);
  return ACL_SUCCESS;
}
EXPORT aclError aclrtMallocHost(void** pointer, size_t bytes) {
  if (posix_memalign(pointer, kAlignment, bytes ? bytes : 1)) return kOutOfMemory;
  Lock lock(mutex);
  pinned_blocks[reinterpret_cast<uintptr_t>(*pointer)] = bytes;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtFreeHost(void* pointer) {
  {
    Lock lock(mutex);
    pinned_blocks.erase(reinterpret_cast<uintptr_t>(pointer));
  }
  std::free(pointer);
  return ACL_SUCCESS;
}
EXPORT aclError aclrtPointerGetAttributes(const void* pointer, aclrtPtrAttributes* attributes) {
  std::memset(attributes, 0, sizeof *attributes);
  Lock lock(mutex);
  attributes->location.type = contains(device_blocks, pointer)   ? ACL_MEM_LOCATION_TYPE_DEVICE
                              : contains(pinned_blocks, pointer) ? ACL_MEM_LOCATION_TYPE_HOST
                                                                 : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtHostRegister(void* pointer, uint64_t, aclrtHostRegisterType, void** device) {
  if (device) *device = pointer;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtHostUnregister(void*) { return ACL_SUCCESS; }
EXPORT aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total) {
  Lock lock(mutex);
  *total = total_bytes();
  *free_bytes = total_bytes() - in_use;
  return ACL_SUCCESS;
}

EXPORT aclError aclrtMemcpy(void* target, size_t, const void* source, size_t bytes, aclrtMemcpyKind kind) {
  if (any_capture()) {
    report("a synchronous copy while a stream is capturing");
    return ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT;
  }
  count_request("host_syncs");
  count_request(copy_name(kind));
  std::memcpy(target, source, bytes);
  return ACL_SUCCESS;
}
EXPORT aclError aclrtMemcpyAsync(void* target, size_t, const void* source, size_t bytes, aclrtMemcpyKind kind,
                                 aclrtStream stream) {
  count_request(copy_name(kind));
  return submit(stream, copy_name(kind), [=] { std::memcpy(target, source, bytes); });
}
EXPORT aclError aclrtMemcpyAsyncWithCondition(void* target, size_t room, const void* source, size_t bytes,
                                              aclrtMemcpyKind kind, aclrtStream stream) {
  return aclrtMemcpyAsync(target, room, source, bytes, kind, stream);
}
EXPORT aclError aclrtMemset(void* target, size_t, int32_t value, size_t bytes) {
  std::memset(target, value, bytes);
  return ACL_SUCCESS;
}
EXPORT aclError aclrtMemsetAsync(void* target, size_t, int32_t value, size_t bytes, aclrtStream stream) {
  return submit(stream, "memset", [=] { std::memset(target, value, bytes); });
}

// Virtual memory: an address range is reserved, physical memory is mapped into it piece by piece.
EXPORT aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp*, aclrtMemGranularityOptions, size_t* bytes) {
  *bytes = kGranularity;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtReserveMemAddress(void** pointer, size_t bytes, size_t, void*, uint64_t) {
  void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return kOutOfMemory;
  Lock lock(mutex);
  reserved[reinterpret_cast<uintptr_t>(range)] = bytes;
  *pointer = range;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtReleaseMemAddress(void* pointer) {
  Lock lock(mutex);
  const auto found = reserved.find(reinterpret_cast<uintptr_t>(pointer));
  if (found != reserved.end()) {
    munmap(pointer, found->second);
    reserved.erase(found);
  }
  return ACL_SUCCESS;
}
EXPORT aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t bytes, const aclrtPhysicalMemProp*, uint64_t) {
  Lock lock(mutex);
  if (in_use + bytes > total_bytes()) return kOutOfMemory;
  in_use += bytes;
  *handle = reinterpret_cast<aclrtDrvMemHandle>(new Physical{bytes});
  return ACL_SUCCESS;
}
EXPORT aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  Lock lock(mutex);
  auto* physical = reinterpret_cast<Physical*>(handle);
  in_use -= physical->bytes;
  delete physical;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtMapMem(void* pointer, size_t bytes, size_t, aclrtDrvMemHandle, uint64_t) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
  if (mmap(pointer, bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) return kOutOfMemory;
  std::memset(pointer, 0xFF, bytes);
  Lock lock(mutex);
  device_blocks[reinterpret_cast<uintptr_t>(pointer)] = bytes;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtUnmapMem(void* pointer) {
  Lock lock(mutex);
  const auto found = device_blocks.find(reinterpret_cast<uintptr_t>(pointer));
  if (found != device_blocks.end()) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    mmap(pointer, found->second, PROT_NONE, flags, -1, 0);
    device_blocks.erase(found);
  }
  return ACL_SUCCESS;
}
