// What torch asks of the C allocator; see heap.cpp.
#pragma once

namespace offloadz {

// From now on torch's blocks in memory go where one of their size was before; whether that could be had.  Once or
// often.
bool fill_holes();

} // namespace offloadz
