// Streams, events and waits on memory words.
//
// Normally a task runs as soon as it is queued, unless its stream is parked. With ASCEND_EMULATOR_DEFER=1 nothing runs
// before somebody waits for it, and then only what that wait needs: work that was never ordered behind what it reads or
// overwrites then gives wrong results instead of right ones by luck.
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace emulator {

std::recursive_mutex mutex;
std::condition_variable_any changed;
std::set<Stream*> streams;

namespace {

constexpr int kPatience = 120;  // rounds without any task finished before a wait counts as a deadlock
constexpr int kPatienceWithTask = 2400;  // the same while another thread is at a task, which may be a long one
constexpr auto kRound = std::chrono::milliseconds(25);
constexpr int kDeadlock = 507014;  // what the real runtime reports when a task does not end in time

bool ready(const Task& task) {
  if (task.kind == Task::Kind::kWaitEvent) {
    return task.event->external ? task.event->recorded > 0 : task.event->recorded >= task.number;
  }
  return task.kind != Task::Kind::kWaitValue || *task.address == static_cast<uint32_t>(task.number);
}

// Run the first task of a stream; false if there is none, it must wait, or another thread is at it.
//
// The task is let go after the lock: its tensors may be the last of theirs, and a thread that gives up a tensor may need
// Python's lock, whose holder may be waiting for this one.
bool step(Stream* stream) {
  TaskPtr task;
  Lock lock(mutex);
  if (stream->running || stream->queue.empty() || !ready(*stream->queue.front())) return false;
  task = stream->queue.front();
  stream->running = true;
  switch (task->kind) {
    case Task::Kind::kRun:
      lock.unlock();
      task->run();
      lock.lock();
      break;
    case Task::Kind::kRecordEvent:
      task->event->recorded = task->event->external ? 1 : task->number;
      task->event->milliseconds = now_milliseconds();
      break;
    case Task::Kind::kResetEvent:
      task->event->recorded = 0;
      break;
    case Task::Kind::kWriteValue:
      *task->address = static_cast<uint32_t>(task->number);
      break;
    default:
      break;  // a wait that is over
  }
  stream->queue.pop_front();
  stream->running = false;
  changed.notify_all();
  return true;
}

std::vector<Stream*> all_streams() {
  Lock lock(mutex);
  return {streams.begin(), streams.end()};
}

// Run one task that brings `stream` on: its own first one, or one of the stream whose event it is waiting for.
bool advance(Stream* stream) {
  for (int depth = 0; stream && depth < 16; ++depth) {
    if (step(stream)) return true;
    Lock lock(mutex);
    const bool waits = !stream->queue.empty() && stream->queue.front()->kind == Task::Kind::kWaitEvent;
    stream = waits ? stream->queue.front()->event->stream : nullptr;
  }
  return false;
}

bool any_running() {
  for (const Stream* stream : streams) {
    if (stream->running) return true;
  }
  return false;
}

// Let the other streams take one task each; true if any did.
bool step_others(Stream* stream) {
  bool progress = false;
  for (Stream* other : all_streams()) progress |= other != stream && step(other);
  return progress;
}

}  // namespace

bool deferring() {
  static const bool value = std::getenv("ASCEND_EMULATOR_DEFER") != nullptr;
  return value;
}

double now_milliseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

Stream* stream_of(void* handle) {
  static Stream default_stream;
  Stream* stream = handle ? static_cast<Stream*>(handle) : &default_stream;
  Lock lock(mutex);
  streams.insert(stream);
  return stream;
}

Mode mode_of(void* handle) {
  Lock lock(mutex);
  Stream* stream = stream_of(handle);
  return stream->capture ? Mode::kCapture : stream->update ? Mode::kUpdate : Mode::kRun;
}

bool defers(void* handle) {
  Lock lock(mutex);
  Stream* stream = stream_of(handle);
  return stream->capture || stream->update || deferring() || !stream->queue.empty();
}

bool any_capture() {
  Lock lock(mutex);
  for (Stream* stream : streams) {
    if (stream->capture) return true;
  }
  return false;
}

void run_pending(Stream* stream) {
  bool ran = false;
  while (step(stream)) ran = true;
  if (!ran) return;
  for (Stream* other : all_streams()) {  // something may have become ready
    if (other != stream) {
      while (step(other)) {
      }
    }
  }
}

void enqueue(Stream* stream, TaskPtr task) {
  {
    Lock lock(mutex);
    stream->queue.push_back(std::move(task));
  }
  if (!deferring()) run_pending(stream);
}

// Run tasks until `done`: those of `stream` and what it waits for; others only if that leads nowhere.
int wait_for(const std::function<bool()>& done, Stream* stream, const char* who) {
  for (int round = 0;;) {
    {
      Lock lock(mutex);
      if (done()) return ACL_SUCCESS;
      if (round >= (any_running() ? kPatienceWithTask : kPatience)) break;
    }
    if (advance(stream) || step_others(stream)) {
      round = 0;
      continue;
    }
    Lock lock(mutex);
    if (done()) return ACL_SUCCESS;
    const bool progress = changed.wait_for(lock, kRound) == std::cv_status::no_timeout;  // by another thread
    round = progress ? 0 : round + 1;
  }
  report(std::string(who) + ": deadlock, tasks wait for an event or a value that never comes");
  return kDeadlock;
}

// Wait until the stream has nothing left to do.
int drain(Stream* stream, const char* who) {
  {
    Lock lock(mutex);
    if (stream->capture) {
      report(std::string(who) + " on a stream that is capturing");
      return ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT;
    }
  }
  return wait_for([&] { return stream->queue.empty() && !stream->running; }, stream, who);
}

int submit(void* handle, const std::string& name, Run run) {
  Stream* stream = stream_of(handle);
  auto task = std::make_shared<Task>();
  task->name = name;
  task->run = std::move(run);
  {
    Lock lock(mutex);
    if (stream->update) {
      if (stream->update_position >= stream->update->size()) {
        report("a task group was updated with more tasks than it has (" + name + ")");
        return ACL_ERROR_STREAM_TASK_GROUP_STATUS;
      }
      TaskPtr& old = (*stream->update)[stream->update_position++];
      if (old->name != name) {
        report("a task group was updated with " + name + " in the place of " + old->name);
        return ACL_ERROR_STREAM_TASK_GROUP_STATUS;
      }
      old->run.swap(task->run);  // what is replaced is let go with `task`, after the lock
      return ACL_SUCCESS;
    }
    if (stream->capture) {
      stream->capture->tasks.push_back(task);
      if (stream->open_group) stream->capture->groups[stream->open_group].push_back(task);
      return ACL_SUCCESS;
    }
  }
  enqueue(stream, std::move(task));
  return ACL_SUCCESS;
}

int synchronize(void* handle, const char* who) {
  count_request("host_syncs");
  return drain(stream_of(handle), who);
}

}  // namespace emulator

using namespace emulator;

namespace {

aclError make_event(aclrtEvent* handle, uint32_t flag) {
  auto* event = new Event;
  event->external = (flag & ACL_EVENT_EXTERNAL) && flag != 0x0EU;  // 0x0E: all flags, the default of older interfaces
  *handle = event;
  return ACL_SUCCESS;
}

TaskPtr event_task(Task::Kind kind, Event* event, uint64_t number) {
  auto task = std::make_shared<Task>();
  task->kind = kind;
  task->event = event;
  task->number = number;
  return task;
}

aclError value_task(Task::Kind kind, void* address, uint64_t value, aclrtStream handle) {
  Stream* stream = stream_of(handle);
  auto task = event_task(kind, nullptr, value);
  task->address = static_cast<volatile uint32_t*>(address);
  {
    Lock lock(mutex);
    if (stream->capture) {
      stream->capture->tasks.push_back(task);
      return ACL_SUCCESS;
    }
  }
  enqueue(stream, task);
  return ACL_SUCCESS;
}

aclError make_stream(aclrtStream* handle) {
  Lock lock(mutex);
  auto* stream = new Stream;
  stream->id = static_cast<int>(streams.size()) + 1;
  streams.insert(stream);
  *handle = stream;
  return ACL_SUCCESS;
}

aclError synchronize_device(const char* who) {
  std::vector<Stream*> all;
  {
    Lock lock(mutex);
    all.assign(streams.begin(), streams.end());
  }
  count_request("device_syncs");
  for (Stream* stream : all) {
    if (const int error = drain(stream, who)) return error;
  }
  return ACL_SUCCESS;
}

}  // namespace

EXPORT aclError aclrtCreateStream(aclrtStream* stream) { return make_stream(stream); }
EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return make_stream(stream); }
EXPORT aclError aclrtDestroyStream(aclrtStream stream) {
  Lock lock(mutex);
  streams.erase(stream_of(stream));  // leaked: a graph may still name it
  return ACL_SUCCESS;
}
EXPORT aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
EXPORT aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = stream_of(stream)->id;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus* status) {
  Stream* stream = stream_of(handle);
  run_pending(stream);
  Lock lock(mutex);
  *status = stream->queue.empty() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtSynchronizeStream(aclrtStream stream) { return synchronize(stream, "aclrtSynchronizeStream"); }
EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  return synchronize(stream, "aclrtSynchronizeStreamWithTimeout");
}
EXPORT aclError aclrtSynchronizeDevice() { return synchronize_device("aclrtSynchronizeDevice"); }
EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return synchronize_device("aclrtSynchronizeDevice"); }

EXPORT aclError aclrtCreateEvent(aclrtEvent* event) { return make_event(event, 0); }
EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return make_event(event, flag); }
EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) { return make_event(event, flag); }
EXPORT aclError aclrtDestroyEvent(aclrtEvent) { return ACL_SUCCESS; }  // leaked: a graph may still name it

EXPORT aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  auto* event = static_cast<Event*>(handle);
  Stream* stream = stream_of(stream_handle);
  uint64_t number;
  {
    Lock lock(mutex);
    if (stream->capture) {
      if (event->external) {
        stream->capture->tasks.push_back(event_task(Task::Kind::kRecordEvent, event, 1));
      } else {
        event->capture = stream->capture;
      }
      return ACL_SUCCESS;
    }
    event->capture = nullptr;
    event->stream = stream;
    number = ++event->issued;
  }
  enqueue(stream, event_task(Task::Kind::kRecordEvent, event, number));
  return ACL_SUCCESS;
}

EXPORT aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  auto* event = static_cast<Event*>(handle);
  Stream* stream = stream_of(stream_handle);
  uint64_t number;
  {
    Lock lock(mutex);
    if (event->external && stream->capture) {
      stream->capture->tasks.push_back(event_task(Task::Kind::kWaitEvent, event, 1));
      return ACL_SUCCESS;
    }
    if (!event->external && event->capture && event->capture->active) {  // the stream joins that capture
      if (!stream->capture) {
        stream->capture = event->capture;
        event->capture->streams.insert(stream);
      }
      return ACL_SUCCESS;
    }
    number = event->issued;
  }
  enqueue(stream, event_task(Task::Kind::kWaitEvent, event, number));
  return ACL_SUCCESS;
}

EXPORT aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream_handle) {
  auto* event = static_cast<Event*>(handle);
  Stream* stream = stream_of(stream_handle);
  {
    Lock lock(mutex);
    if (stream->capture) {
      stream->capture->tasks.push_back(event_task(Task::Kind::kResetEvent, event, 0));
      return ACL_SUCCESS;
    }
  }
  if (event->external) enqueue(stream, event_task(Task::Kind::kResetEvent, event, 0));
  return ACL_SUCCESS;
}

EXPORT aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  auto* event = static_cast<Event*>(handle);
  {
    Lock lock(mutex);
    if (event->capture && event->capture->active) {
      report("aclrtSynchronizeEvent on an event of a running capture");
      return ACL_ERROR_RT_EVENT_CAPTURED;
    }
  }
  count_request("event_syncs");
  return wait_for([&] { return event->recorded >= event->issued; }, event->stream, "aclrtSynchronizeEvent");
}

EXPORT aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  auto* event = static_cast<Event*>(handle);
  Lock lock(mutex);
  if (event->capture && event->capture->active) return ACL_ERROR_RT_EVENT_CAPTURED;
  const bool done = event->recorded >= event->issued;
  *status = done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
EXPORT aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent from, aclrtEvent to) {
  *milliseconds = static_cast<float>(static_cast<Event*>(to)->milliseconds - static_cast<Event*>(from)->milliseconds);
  return ACL_SUCCESS;
}
EXPORT aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
  *microseconds = static_cast<uint64_t>(static_cast<Event*>(event)->milliseconds * 1e3);
  return ACL_SUCCESS;
}

EXPORT aclError aclrtValueWait(void* address, uint64_t value, uint32_t, aclrtStream stream) {
  return value_task(Task::Kind::kWaitValue, address, value, stream);
}
EXPORT aclError aclrtValueWrite(void* address, uint64_t value, uint32_t, aclrtStream stream) {
  return value_task(Task::Kind::kWriteValue, address, value, stream);
}
