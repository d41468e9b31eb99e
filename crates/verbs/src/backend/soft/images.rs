//! The whole states of queue pairs, from one RNIC and to another: many in a request, and large ones in shared memory.

use std::os::fd::AsFd;

use verbatim_device::control::{MOST_QPS, Reply, Request};
use verbatim_device::image::{self, QpImage, Restoring};

use super::control::{Control, call, no_answer, wrong};
use crate::backend::TakenUp;
use crate::error::VerbsError;

impl Control {
    pub fn dump_qps(&self, qpns: &[u32]) -> Result<Vec<QpImage>, VerbsError> {
        const VERB: &str = "dump_qp";
        let connection = self.lock();
        let mut images = Vec::new();
        while let left @ [_, ..] = &qpns[images.len()..] {
            let request = Request::DumpQps {
                qpns: left[..left.len().min(MOST_QPS)].to_vec(),
            };
            let mut received = call(&connection, VERB, &request, &[])?;
            let Reply::QpImages(carried) = received.message else {
                return wrong(VERB, received.message);
            };
            let first = image::take(carried, &mut received.fds).map_err(no_answer(VERB))?;
            if first.is_empty() || first.len() > left.len() {
                return Err(VerbsError::Invalid(format!(
                    "the RNIC sent {} images in place of {}",
                    first.len(),
                    left.len()
                )));
            }
            images.extend(first);
        }
        Ok(images)
    }

    pub fn restore_qps(&self, images: &[TakenUp<'_>]) -> Result<Vec<Result<(), VerbsError>>, VerbsError> {
        const VERB: &str = "restore_qp";
        let mut restoring = Restoring::default();
        for taken_up in images {
            restoring.add(taken_up.qpn, taken_up.image, taken_up.sgid_index);
        }
        let mut results: Vec<Result<(), VerbsError>> = Vec::new();
        for request in restoring.requests() {
            let (request, memory) = request.map_err(no_answer(VERB))?;
            let Request::RestoreQps { qps, .. } = &request else {
                unreachable!("that is what they are");
            };
            let first = results.len();
            results.extend(qps.iter().map(|_| Ok(())));
            let fds: Vec<_> = memory.iter().map(AsFd::as_fd).collect();
            match self.call_with(VERB, &request, &fds) {
                Ok(Reply::QpsRestored { refused, message }) => {
                    for (index, errno) in refused {
                        if let Some(result) = results.get_mut(first + index as usize) {
                            let message = message.clone();
                            *result = Err(VerbsError::Refused {
                                verb: VERB,
                                errno,
                                message,
                            });
                        }
                    }
                }
                Ok(reply) => return wrong(VERB, reply),
                Err(VerbsError::Refused { verb, errno, message }) => {
                    for result in &mut results[first..] {
                        let message = message.clone();
                        *result = Err(VerbsError::Refused { verb, errno, message });
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(results)
    }
}
