# Sets TRIVET_ORT_INCLUDE_DIR: the folder of the ONNX Runtime C API headers (see ort_headers.py for where they come from).
if(NOT TRIVET_ORT_INCLUDE_DIR)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/ort_headers.py"
    OUTPUT_VARIABLE ort_include_dir
    OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_VARIABLE ort_headers_error
    ERROR_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE ort_headers_result)
  if(NOT ort_headers_result EQUAL 0)
    message(FATAL_ERROR "${ort_headers_error}")
  endif()
  set(TRIVET_ORT_INCLUDE_DIR "${ort_include_dir}" CACHE PATH "Folder of the ONNX Runtime C API headers")
endif()
message(STATUS "ONNX Runtime headers: ${TRIVET_ORT_INCLUDE_DIR}")
