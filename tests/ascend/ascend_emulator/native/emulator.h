// What the emulated AscendCL runtime offers to its own parts and to the operator layer.
//
// One process, one fake device whose memory is host memory. Streams run their tasks in order; a stream parks on an
// event or a value that has not come yet. While a stream is capturing, tasks go into the graph instead and nothing runs.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace emulator {

using Run = std::function<void()>;

enum class Mode {
  kRun,      // tasks are executed
  kCapture,  // tasks are recorded into a graph
  kUpdate,   // tasks replace those of a recorded task group
};

Mode mode_of(void* stream);

// Whether a task submitted now would not have run when submit() returns.
bool defers(void* stream);

// Queue, record or replace one task; returns an aclError (0 = success).
int submit(void* stream, const std::string& name, Run run);

// Wait until everything queued on the stream has run; an error while the stream captures.
int synchronize(void* stream, const char* who);

// Whether any stream of the process captures.
bool any_capture();

// Named counters, read by the tests: replays, syncs, copies, operators.
void count(const std::string& name, long by = 1);

// The same for what the host asked the device for, and once more under who asked: "<origin>: <name>". Finding out may
// take Python's lock, so the caller must not hold the runtime's.
void count_request(const std::string& name);

// Note a refusal for the test report and print it.
void report(const std::string& message);

}  // namespace emulator
